//! Tests in a real Kubernetes cluster of two nodes, one at a time.

mod drain;
mod farm;
mod losses;
mod metrics;
mod outside;
mod release;
mod scaling;
mod smoke;
