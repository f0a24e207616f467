//! How a verb that reads prints.

use clap::ValueEnum;

/// For people, or for programs.
#[derive(Clone, Copy, Default, ValueEnum)]
pub enum Output {
    /// Columns
    #[default]
    Table,
    /// JSON
    Json,
}
