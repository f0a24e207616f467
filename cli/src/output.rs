//! How verbs print, and the macros by which they do, in the place of std's, which end in a panic when nobody reads.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

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

macro_rules! print {
    ($($word:tt)*) => { $crate::output::put(format_args!($($word)*)) };
}

macro_rules! println {
    ($($word:tt)*) => { print!("{}\n", format_args!($($word)*)) };
}

/// If nobody hears it, nobody can be told.
macro_rules! eprint {
    ($($word:tt)*) => { drop(std::io::Write::write_fmt(&mut std::io::stderr(), format_args!($($word)*))) };
}

macro_rules! eprintln {
    ($($word:tt)*) => { eprint!("{}\n", format_args!($($word)*)) };
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

/// Whoever reads has seen enough, as `grep -q` may have.
static UNHEARD: AtomicBool = AtomicBool::new(false);

/// Whether nobody reads any more: who only prints has nothing left to do.
pub fn is_unheard() -> bool {
    UNHEARD.load(Ordering::Relaxed)
}

/// At once. If nobody reads, a verb still ends as it would have: somebody may wait for its exit code.
pub fn put(words: Arguments<'_>) {
    let mut out = io::stdout();
    let Err(error) = out.write_fmt(words).and_then(|()| out.flush()) else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        UNHEARD.store(true, Ordering::Relaxed);
        return;
    }
    eprintln!("harmonia-ci: what was asked for cannot be written: {error}");
    std::process::exit(1)
}
