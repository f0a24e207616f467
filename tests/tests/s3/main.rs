//! Tests against real S3 servers, one module a concern.

mod cache;
mod directory;
mod hostile;
mod kills;
mod names;
mod proxy;
mod publish;
mod servers;
mod substitute;
mod trouble;
mod twins;
