//! The daemon client against bytes: what real daemons do not say, and what nobody should.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod bytes;
mod derivation;
mod hostile;
mod script;
mod versions;
