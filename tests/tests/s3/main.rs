//! Tests against real S3 servers, one module a concern.

mod cache;
mod directory;
mod forget;
mod hostile;
mod keys;
mod kills;
mod names;
mod proxy;
mod publish;
mod resync;
mod servers;
mod substitute;
mod sweep;
mod trouble;
mod twins;
