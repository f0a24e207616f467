//! What the roles of harmonia-ci share.

pub mod ansi;
pub mod api;
pub mod bucket;
pub mod database;
pub mod health;
pub mod layout;
pub mod metrics;
pub mod moment;
pub mod nearest;
pub mod netrc;
pub mod problem;
pub mod protocol;
pub mod quantity;
pub mod secret;
pub mod sentence;
pub mod serve;
pub mod settings;
pub mod supervised;
pub mod trace;
