//! What harmonia-ci needs of Nix, and no more.

pub mod daemon;
pub mod hash;

pub use hash::Sha256;
