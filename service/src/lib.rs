//! What the roles of harmonia-ci share.

pub mod bucket;
pub mod health;
pub mod layout;
pub mod problem;
pub mod protocol;
pub mod secret;
pub mod serve;
pub mod settings;
