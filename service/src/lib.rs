//! What the roles of harmonia-ci share.

pub mod protocol;
