//! `harmonia-ci completions`, `man` and the reference in docs/: all made from the same definitions.

use std::path::PathBuf;

use clap::{Args, Command, CommandFactory, ValueEnum};
use clap_complete::Shell;
use harmonia_service::metrics::Metrics;
use harmonia_service::settings;

use crate::outcome::Failure;

/// Print what makes a shell complete commands and options
#[derive(Args)]
pub struct Completions {
    /// Which shell
    shell: Shell,
}

/// Write the man pages
#[derive(Args)]
pub struct Man {
    /// Into this directory
    directory: PathBuf,
}

/// Print a page of docs/reference
#[derive(Args)]
pub struct Reference {
    /// Which page
    page: Page,
}

#[derive(Clone, Copy, ValueEnum)]
enum Page {
    Cli,
    Crds,
    Metrics,
    Settings,
}

pub fn completions(arguments: &Completions) -> Result<(), Failure> {
    let mut command = crate::Arguments::command();
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "harmonia-ci", &mut script);
    print!("{}", String::from_utf8_lossy(&script));
    Ok(())
}

pub fn man(arguments: &Man) -> Result<(), Failure> {
    let directory = &arguments.directory;
    let failed = |source| Failure::Write { file: directory.clone(), source };
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(crate::Arguments::command(), directory).map_err(failed)
}

pub fn reference(arguments: &Reference) -> Result<(), Failure> {
    match arguments.page {
        Page::Cli => print!("{}", cli_page()),
        Page::Crds => print!("{}", harmonia_crds::reference::page()),
        Page::Metrics => print!("{}", metrics_page()),
        Page::Settings => print!("{}", settings_page()),
    }
    Ok(())
}

/// Every command with its help, as it prints it.
fn cli_page() -> String {
    let mut command = crate::Arguments::command();
    command.build();
    let mut text = "# Commands\n\nMade by `harmonia-ci reference cli`.\n".to_owned();
    describe(&mut command, &mut text);
    text
}

fn describe(command: &mut Command, text: &mut String) {
    let name = command.get_bin_name().unwrap_or(command.get_name()).to_owned();
    let help = command.render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    *text += &format!("\n## `{name}`\n\n```text\n{}\n```\n", lines.join("\n").trim_end());
    for below in
        command.get_subcommands_mut().filter(|below| !below.is_hide_set() && below.get_name() != "help")
    {
        describe(below, text);
    }
}

/// Every setting of the roles.
fn settings_page() -> String {
    let mut text = "# Settings of the roles\n\nMade by `harmonia-ci reference settings`. Each is a key of the TOML file that HARMONIA_CI_CONFIG names, \
                    or a variable of the\nenvironment, which wins. A secret can be given as a file instead, by the same name with `_file` behind it, \
                    which is read again when it changes.\n\n| setting | variable | what it is |\n| --- | --- | --- |\n"
        .to_owned();
    for (name, secret, what) in settings::KNOWN {
        let mark = if *secret { " (secret)" } else { "" };
        text += &format!("| `{name}` | `HARMONIA_CI_{}` | {what}{mark} |\n", name.to_ascii_uppercase());
    }
    text
}

/// Every metric of the roles.
fn metrics_page() -> String {
    let mut text = "# Metrics of the roles\n\nMade by `harmonia-ci reference metrics`. Every role serves them at `/metrics` of its own port.\n".to_owned();
    for (role, metrics) in metrics_of_roles() {
        text +=
            &format!("\n## {role}\n\n| metric | kind | labels | what it is |\n| --- | --- | --- | --- |\n");
        for metric in metrics.known() {
            let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
            text += &format!(
                "| `{}` | {} | {} | {} |\n",
                metric.name(),
                metric.kind(),
                labels.join(", "),
                metric.help
            );
        }
    }
    text
}

fn metrics_of_roles() -> [(&'static str, Metrics); 5] {
    let of = |register: fn(&mut Metrics)| {
        let mut metrics = Metrics::default();
        register(&mut metrics);
        metrics
    };
    [
        ("operator", of(|metrics| drop(harmonia_operator::Counts::register(metrics)))),
        ("signer", of(|metrics| harmonia_signer::Counts::default().register(metrics))),
        (
            "frontend",
            of(|metrics| {
                harmonia_frontend::Gauges::register(metrics);
                harmonia_frontend::Counts::register(metrics);
                harmonia_frontend::ForgeCounts::register(metrics);
            }),
        ),
        ("evaluator", of(|metrics| drop(harmonia_evaluator::Counts::register(metrics)))),
        ("builder", of(|metrics| drop(harmonia_builder::Counts::register(metrics)))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `harmonia-ci reference cli > docs/reference/cli.md`
    #[test]
    fn the_reference_of_commands_is_up_to_date() {
        assert!(cli_page() == include_str!("../../docs/reference/cli.md"), "make it again");
    }

    /// `harmonia-ci reference crds > docs/reference/crds.md`
    #[test]
    fn the_reference_of_custom_resources_is_up_to_date() {
        assert!(
            harmonia_crds::reference::page() == include_str!("../../docs/reference/crds.md"),
            "make it again"
        );
    }

    /// `harmonia-ci reference settings > docs/reference/settings.md`
    #[test]
    fn the_reference_of_settings_is_up_to_date() {
        assert!(settings_page() == include_str!("../../docs/reference/settings.md"), "make it again");
    }

    /// `harmonia-ci reference metrics > docs/reference/metrics.md`
    #[test]
    fn the_reference_of_metrics_is_up_to_date() {
        assert!(metrics_page() == include_str!("../../docs/reference/metrics.md"), "make it again");
    }

    #[test]
    fn the_commands_are_well_formed() {
        crate::Arguments::command().debug_assert();
    }
}
