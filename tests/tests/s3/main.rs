//! Tests against real S3 servers, one module a concern.

mod hostile;
mod kills;
mod proxy;
mod publish;
mod servers;
mod trouble;
mod twins;
