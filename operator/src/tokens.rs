//! Tokens that we make for others to use.

use harmonia_queue::people::{self, Scope};
use harmonia_queue::{Db, Error, Result};

/// The token `known`, if it still lets its owner in under that name; else a new one.
pub async fn keep(db: &Db, name: &str, scope: Scope, known: Option<&str>) -> Result<String> {
    if let Some(known) = known
        && people::token_scope(db, known).await?.is_some_and(|(of, allows)| of == name && allows == scope)
    {
        return Ok(known.to_owned());
    }
    renew(db, name, scope).await
}

/// A new token, which takes the place of another of that name.
pub async fn renew(db: &Db, name: &str, scope: Scope) -> Result<String> {
    match people::revoke_token(db, name).await {
        Ok(()) | Err(Error::NotFound(_)) => {}
        Err(error) => return Err(error),
    }
    people::create_token(db, name, scope, None).await
}
