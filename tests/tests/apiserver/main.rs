//! Tests against a real Kubernetes API without nodes.

mod chart;
mod installation;
mod nodes;
mod pools;
mod projects;
mod resources;
mod scaling;
mod smoke;
