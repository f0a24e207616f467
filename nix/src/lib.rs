//! What harmonia-ci needs of Nix, and no more.

pub mod daemon;
pub mod database;
pub mod hash;
pub mod key;
pub mod narinfo;
pub mod pack;
pub mod proof;
pub mod realisation;
pub mod resolve;
pub mod source;
pub mod store_path;

pub use hash::Sha256;
pub use store_path::StorePath;
