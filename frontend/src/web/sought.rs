//! `/find`: from a word to a build.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Redirect, Response};
use harmonia_queue::builds::{self, Found};
use maud::html;
use serde::Deserialize;

use super::Web;
use super::ask::Asked;
use super::frame::{Page, Trouble};
use super::visitor::Looking;
use crate::escape::escape;

/// What somebody looks for.
#[derive(Deserialize)]
pub struct Sought {
    #[serde(default)]
    q: String,
}

/// The build, or what else it could have been.
pub async fn find(
    Looking(visitor): Looking,
    State(web): State<Arc<Web>>,
    Asked(sought): Asked<Sought>,
) -> Result<Response, Trouble> {
    let word = sought.q.trim();
    let found = match word {
        "" => Found::Nothing,
        word => builds::find(&*web.db().await, word, None).await?,
    };
    let content = match found {
        Found::Build(id) => return Ok(Redirect::to(&format!("/builds/{id}")).into_response()),
        Found::Error(error) => {
            html! { h1 { (word) } p { "It could not be evaluated:" } pre.words { (error) } }
        }
        Found::Several(names) => html! {
            h1 { "Several attributes are like “" (word) "”" }
            ul { @for name in &names { li { a href=(format!("/find?q={}", escape(name))) { (name) } } } }
        },
        Found::Nothing => html! {
            h1 { "Nothing is called “" (word) "”" }
            p { "Give a build’s number, a .drv path, an output path, or an attribute of the latest evaluations." }
        },
    };
    let rest = html! {};
    Ok(Page { title: "Find", place: "", visitor: &visitor, again: None, stale: false, content, rest }
        .into_response())
}
