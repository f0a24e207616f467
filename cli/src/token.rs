//! `harmonia-ci token`

use std::time::Duration;

use clap::{Args, Subcommand};
use harmonia_queue::people::{self, Scope};
use harmonia_service::api::{Changed, NewToken, Secret, Token};
use harmonia_service::quantity::Span;
use reqwest::Method;

use crate::client::{Farm, word};
use crate::database::Database;
use crate::outcome::Failure;
use crate::output::Output;
use crate::table::{self, table};

/// Make, list and revoke the tokens of the API and the cache
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Verb,

    #[command(flatten)]
    farm: Farm,
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
        #[arg(long, value_name = "TIME", value_parser = lifetime)]
        expires_in: Option<Duration>,

        /// Straight in a database, where there is no token yet that could ask for one
        #[command(flatten)]
        database: Database,
    },
    /// List the tokens, without their secrets
    List {
        /// How to print
        #[arg(short, long, value_enum, default_value_t)]
        output: Output,
    },
    /// Revoke a token; the cache may let it in for a few seconds more
    Revoke {
        /// Its name
        name: String,
    },
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    match arguments.verb {
        Verb::Create { name, scope, expires_in, database } if database.is_named() => {
            println!("{}", people::create_token(&database.queue().await?, &name, scope, expires_in).await?);
        }
        Verb::Create { name, scope, expires_in, .. } => {
            let expires_in = expires_in.map(|time| format!("{}s", time.as_secs()));
            let token = NewToken { name, scope: scope.as_str().to_owned(), expires_in };
            let client = arguments.farm.client()?;
            let Secret { secret } = client.send(Method::POST, "tokens", Some(&token)).await?;
            println!("{secret}");
        }
        Verb::List { output } => {
            let tokens: Vec<Token> = arguments.farm.client()?.get("tokens").await?;
            output.print(&tokens, || describe(&tokens, table::width()));
        }
        Verb::Revoke { name } => {
            let path = format!("tokens/{}", word(&name));
            let _: Changed = arguments.farm.client()?.send(Method::DELETE, &path, None::<&()>).await?;
            println!("revoked {name}");
        }
    }
    Ok(())
}

fn describe(tokens: &[Token], width: Option<usize>) -> String {
    let row = |token: &Token| {
        let expires = match &token.expires_at {
            Some(moment) if token.expired => format!("{moment} (expired)"),
            Some(moment) => moment.clone(),
            None => "never".to_owned(),
        };
        vec![token.name.clone(), token.scope.clone(), token.created_at.clone(), expires]
    };
    let rows: Vec<Vec<String>> = tokens.iter().map(row).collect();
    table(&["NAME", "SCOPE", "CREATED", "EXPIRES"], &rows, width)
}

/// Not nothing, and not for ever: who wants that leaves it out.
fn lifetime(text: &str) -> Result<Duration, String> {
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
        assert_eq!(lifetime("30d").unwrap(), Duration::from_secs(30 * 86_400));
        assert_eq!(lifetime("90m").unwrap(), Duration::from_secs(90 * 60));
        for text in ["", "d", "-1d", "0s", "1.5h", "99999999999d", "9999999w", "3é"] {
            assert!(lifetime(text).is_err(), "{text}");
        }
    }
}
