//! `harmonia-ci audit`

use clap::Args;
use serde_json::json;
use sqlx::Row;

use crate::database::Database;
use crate::outcome::Failure;
use crate::output::Output;

/// Check the queue's invariants; prints each violation and fails if there is one
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    database: Database,

    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let mut connection = arguments.database.connect().await?;
    // The simple protocol: it works through every pooler.
    let rows = sqlx::raw_sql("SELECT violation, coalesce(subject, '') FROM ci.audit()")
        .fetch_all(&mut connection)
        .await
        .map_err(Failure::Query)?;
    let violations = rows
        .iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect::<Result<Vec<(String, String)>, sqlx::Error>>()
        .map_err(Failure::Query)?;

    match arguments.output {
        Output::Json => {
            let list = violations
                .iter()
                .map(|(violation, subject)| json!({ "violation": violation, "subject": subject }));
            println!("{}", list.collect::<serde_json::Value>());
        }
        Output::Table if violations.is_empty() => println!("the queue is sound"),
        Output::Table => {
            let width = violations.iter().map(|(violation, _)| violation.chars().count()).max().unwrap_or(0);
            for (violation, subject) in &violations {
                println!("{violation:width$}  {subject}");
            }
        }
    }
    if violations.is_empty() { Ok(()) } else { Err(Failure::Reported) }
}
