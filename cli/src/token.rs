//! `harmonia-ci token`

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use harmonia_queue::people::{self, Scope, Token};
use serde_json::json;

use crate::database::Database;
use crate::outcome::Failure;

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

#[derive(Clone, Copy, Default, ValueEnum)]
enum Output {
    #[default]
    Table,
    Json,
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

/// A number and a unit.
fn duration(text: &str) -> Result<Duration, String> {
    let units = [('s', 1), ('m', 60), ('h', 3600), ('d', 86_400), ('w', 7 * 86_400)];
    let unit = units.iter().find_map(|(letter, seconds)| Some((text.strip_suffix(*letter)?, *seconds)));
    let seconds = unit.and_then(|(number, seconds)| number.parse::<u32>().ok()?.checked_mul(seconds));
    match seconds {
        Some(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds.into())),
        _ => Err("write a number and s, m, h, d or w, such as 30d, of at most 136 years".to_owned()),
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
        for text in ["", "d", "30", "-1d", "0s", "1.5h", "30 d", "99999999999d", "9999999w", "3é"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
