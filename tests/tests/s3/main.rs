//! Tests against real S3 servers, one module a concern.

mod publish;
mod servers;
