//! A client of the Nix daemon, for worker protocol 1.34 (Nix 2.8) to 1.38.
//!
//! A [`Connection`] runs one operation at a time. An operation that is dropped, times out or loses step closes its
//! socket there and then: the daemon kills what it was building, and the next use says [`Error::Broken`]. An error
//! that the daemon itself reports ends the operation alone. [`Daemon`] is the handle that connects again by itself.

mod build;
mod connection;
mod delete;
mod error;
mod handle;
mod message;
mod options;
mod query;
pub mod wire;

pub use build::{BasicDerivation, BasicOutput, BuildResult, BuildStatus, BuiltOutput, Unresolved};
pub use connection::{Connection, QUERY_LIMIT};
pub use delete::{Freed, Garbage};
pub use error::{DaemonError, Error, Result, plain};
pub use handle::Daemon;
pub use message::{ActivityKind, Field, Message, Quiet, ResultKind, Sink};
pub use options::{Options, Verbosity};
pub use wire::handshake::{Server, Trust};
