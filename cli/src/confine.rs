//! `harmonia-ci confine`

use std::ffi::OsString;

use clap::Args;

use crate::outcome::Failure;

/// Gives up all that an evaluation must not have, and becomes a program: for the evaluator only
#[derive(Args)]
pub struct Arguments {
    spec: String,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    Ok(harmonia_evaluator::confine(&arguments.spec, &arguments.program)?)
}
