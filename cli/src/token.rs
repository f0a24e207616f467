//! `harmonia-ci token`

use std::time::Duration;

use clap::{Args, Subcommand};
use harmonia_queue::people::{self, Scope, Token};
use harmonia_service::quantity::Span;
use serde_json::json;

use crate::database::Database;
use crate::outcome::Failure;
use crate::output::Output;

/// Make, list and revoke the tokens of the API and the cache
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Make a token and print its secret, which is shown this once
    Create {
        /// Its name, by which it is revoked
        name: String,

        /// What it allows: read, operate or admin
        #[arg(long, default_value = "read")]
        scope: Scope,

        /// How long it lasts, such as 12h or 30d; without it, until it is revoked
        #[arg(long, value_name = "TIME", value_parser = duration)]
        expires_in: Option<Duration>,

        #[command(flatten)]
        database: Database,
    },
    /// List the tokens, without their secrets
    List {
        #[command(flatten)]
        database: Database,

        /// How to print
        #[arg(short, long, value_enum, default_value_t)]
        output: Output,
    },
    /// Revoke a token; the cache may let it in for a few seconds more
    Revoke {
        /// Its name
        name: String,

        #[command(flatten)]
        database: Database,
    },
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    match arguments.verb {
        Verb::Create { name, scope, expires_in, database } => {
            println!("{}", people::create_token(&database.queue().await?, &name, scope, expires_in).await?);
        }
        Verb::List { database, output } => {
            let tokens = people::list_tokens(&database.queue().await?).await?;
            match output {
                Output::Json => println!("{}", tokens.iter().map(object).collect::<serde_json::Value>()),
                Output::Table => print!("{}", table(&tokens)),
            }
        }
        Verb::Revoke { name, database } => {
            people::revoke_token(&database.queue().await?, &name).await?;
            println!("revoked {name}");
        }
    }
    Ok(())
}

fn object(token: &Token) -> serde_json::Value {
    json!({
        "name": token.name,
        "scope": token.scope.as_str(),
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "expired": token.expired,
    })
}

fn table(tokens: &[Token]) -> String {
    let width = tokens.iter().map(|token| token.name.chars().count()).chain([4]).max().unwrap_or(0);
    let head = format!("{:width$}  {:7}  {:20}  EXPIRES\n", "NAME", "SCOPE", "CREATED");
    tokens.iter().fold(head, |text, token| {
        let expires = match &token.expires_at {
            Some(moment) if token.expired => format!("{moment} (expired)"),
            Some(moment) => moment.clone(),
            None => "never".to_owned(),
        };
        let (name, scope, created) = (&token.name, token.scope.as_str(), &token.created_at);
        format!("{text}{name:width$}  {scope:7}  {created:20}  {expires}\n")
    })
}

/// Not nothing, and not for ever: who wants that leaves it out.
fn duration(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);
    match text.parse::<Span>() {
        Ok(Span(time)) if !time.is_zero() && time <= LONGEST => Ok(time),
        Ok(_) => Err("a token lasts from a second to a hundred years".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_number_and_a_unit() {
        assert_eq!(duration("30d").unwrap(), Duration::from_secs(30 * 86_400));
        assert_eq!(duration("90m").unwrap(), Duration::from_secs(90 * 60));
        for text in ["", "d", "-1d", "0s", "1.5h", "99999999999d", "9999999w", "3é"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
