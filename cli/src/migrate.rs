//! `harmonia-ci migrate`

use clap::Args;
use harmonia_queue::logins;
use harmonia_queue::migrate::{migrate, roles_sql};
use sqlx::postgres::PgConnectOptions;

use crate::database::Database;
use crate::outcome::Failure;

/// Bring the database to this release's schema; it can be run again at any time
///
/// The login is a superuser, or owns the database and may create roles. Otherwise let a superuser run what --print-roles
/// prints first. The URL must reach PostgreSQL itself, not a pooler.
#[derive(Args)]
pub struct Arguments {
    /// Print the SQL that a superuser runs beforehand where the login is an ordinary one, and do nothing else
    #[arg(long)]
    print_roles: bool,

    #[command(flatten)]
    database: Database,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let url = arguments.database.url()?;
    if arguments.print_roles {
        let options: PgConnectOptions = url.parse().map_err(Failure::Connect)?;
        print!("{}", roles_sql(options.get_database().unwrap_or_else(|| options.get_username())));
        print!("{}", logins::by_hand());
        return Ok(());
    }
    let report = migrate(&url).await?;
    for file in &report.applied {
        println!("applied {file}");
    }
    match report.newer {
        Some(schema) => {
            println!("the schema is of a later release (migration {schema}), and works for this one")
        }
        None if report.applied.is_empty() => println!("the schema is up to date"),
        None => {}
    }
    for sentence in &report.open {
        eprintln!("warning: {sentence}");
    }
    if !report.open.is_empty() {
        eprintln!("A superuser can close this: run what `harmonia-ci migrate --print-roles` prints.");
    }
    Ok(())
}
