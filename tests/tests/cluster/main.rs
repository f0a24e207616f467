//! Tests in a real Kubernetes cluster of two nodes, one at a time.

mod drain;
mod losses;
mod metrics;
mod outside;
mod policy;
mod release;
mod scaling;
mod smoke;
