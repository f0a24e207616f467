//! What harmonia-ci needs of Nix, and no more.

pub mod hash;
pub mod pack;

pub use hash::Sha256;
