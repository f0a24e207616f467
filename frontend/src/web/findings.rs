//! `/findings`: builds that made something else the second time.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use harmonia_queue::pages::{self, Finding};
use maud::{Markup, html};
use serde::Deserialize;

use super::Web;
use super::ask::Asked;
use super::frame::{Page, Trouble};
use super::parts::{further, since, table};
use super::visitor::Looking;
use crate::api::page;

const LISTED: i64 = 50;

/// Which part of them.
#[derive(Deserialize)]
pub struct Part {
    after: Option<String>,
}

/// The page.
pub async fn show(
    Looking(visitor): Looking,
    State(web): State<Arc<Web>>,
    Asked(part): Asked<Part>,
) -> Result<Response, Trouble> {
    web.live.version();
    let before = page::number(part.after.as_deref())?;
    let found = pages::findings(&*web.db().await, before, LISTED + 1).await?;
    let list = page::cut(found, LISTED, |finding| finding.id.to_string(), |finding| finding);
    let content = html! {
        h1 { "Reproducibility" }
        p.legend { "The first result of a path counts for ever. A second build of it that differs is written down here." }
        (rows(&list.items))
        (further(list.next.map(|next| format!("/findings?after={next}"))))
    };
    let again = before.map_or("/findings".to_owned(), |before| format!("/findings?after={before}"));
    let (place, rest) = ("/findings", html! {});
    let page = Page {
        title: "Findings",
        place,
        visitor: &visitor,
        again: Some(&again),
        stale: false,
        content,
        rest,
    };
    Ok(page.into_response())
}

fn rows(list: &[Finding]) -> Markup {
    table(
        "Findings",
        html! {
            thead { tr { th { "Path" } th { "Counts" } th { "Differs" } th { "Build" } th { "Node" } th { "Found" } } }
            tbody {
                @for finding in list {
                    tr {
                        td { code { (finding.path) } }
                        td { code.hash title=(finding.canonical) { (finding.canonical.get(..12).unwrap_or_default()) } }
                        td { code.hash title=(finding.seen) { (finding.seen.get(..12).unwrap_or_default()) } }
                        td { a href=(format!("/builds/{}", finding.build)) { (finding.build) } ", " a href=(format!("/builds/{}/log?attempt={}", finding.build, finding.attempt)) { "attempt " (finding.attempt) } }
                        td { (finding.node.as_deref().unwrap_or("–")) }
                        td { (since(&finding.found_at)) }
                    }
                } @if list.is_empty() { tr { td colspan="6" { "None: whatever was built twice came out the same." } } }
            }
        },
    )
}
