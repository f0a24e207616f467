//! How a verb that reads prints.

use clap::ValueEnum;
use serde::Serialize;

/// For people, or for programs.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    #[default]
    Table,
    /// JSON
    Json,
}

impl Output {
    /// Prints one or the other.
    pub fn print(self, value: &impl Serialize, text: impl FnOnce() -> String) {
        match self {
            Self::Table => print!("{}", text()),
            Self::Json => println!("{}", serde_json::to_string_pretty(value).unwrap_or_default()),
        }
    }
}
