//! Whether whoever looks at a page may start and stop what is on it.

use std::time::Duration;

use axum::http::StatusCode;
use harmonia_queue::people::Scope;
use harmonia_service::problem::Problem;
use tokio::time::timeout;

use super::Web;
use super::visitor::Visitor;
use crate::forge::Member;
use crate::member::{Target, is_allowed};

/// How long a page waits to know whether it has a button.
const PATIENCE: Duration = Duration::from_secs(1);

impl Web {
    /// Whether a button is shown. A forge that does not answer, or not soon, shows none.
    pub async fn offers(&self, visitor: &Visitor, target: Target) -> bool {
        match visitor.member() {
            _ if visitor.may(Scope::Operate) => true,
            Some(member) => {
                let allowed = timeout(PATIENCE, self.is_allowed(member, target, true)).await;
                matches!(allowed, Ok(Ok(true)))
            }
            None => false,
        }
    }

    /// Whether it is done. The forge is asked now.
    pub async fn require(&self, visitor: &Visitor, target: Target) -> Result<(), Problem> {
        let allowed = match visitor.member() {
            _ if visitor.may(Scope::Operate) => true,
            Some(member) => self.is_allowed(member, target, false).await?,
            None => false,
        };
        if allowed {
            return Ok(());
        }
        let sentence = "this takes the scope operate, or the right to push to the repository of every project that it is about";
        Err(Problem::new(StatusCode::FORBIDDEN, sentence))
    }

    async fn is_allowed(&self, member: &Member, target: Target, by_memory: bool) -> Result<bool, Problem> {
        // Nobody waits for a forge while others wait for the database.
        let places = target.places(&*self.db().await).await?;
        is_allowed(&self.forges, member, target, &places, by_memory).await
    }
}
