//! Tests against real S3 servers, one module a concern.

mod proxy;
mod servers;
