//! Tests against real S3 servers, one module a concern.

mod cache;
mod proxy;
mod publish;
mod servers;
mod substitute;
