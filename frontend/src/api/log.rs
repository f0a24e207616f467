//! `/api/builds/{id}/log`: the archived log, or the live end of one that is being written.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use harmonia_nix::store_path;
use harmonia_queue::builds::{self, Attempt, Build};
use harmonia_service::api::LogPiece;
use harmonia_service::layout;
use harmonia_service::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;

use super::Api;
use super::ask::{Number, Query, Reader};
use super::builds::known;
use super::follow::{Follower, Start};
use super::openapi::Refusals;

/// Which log.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Which {
    /// Of this attempt; without it, of the one that runs, or of the last one that left a log
    #[param(minimum = 1)]
    attempt: Option<i64>,
    /// Wait for an attempt if none runs, and go on with the next one until the build has ended
    #[serde(default)]
    #[param(required = false)]
    follow: bool,
}

/// The log of a build
///
/// Plain text once the attempt has ended. While it runs: server-sent events, each with a `LogPiece` as data; the `id` is
/// `<attempt>:<offset of the byte after it>`, and `Last-Event-ID` resumes there, also after the attempt has ended. An offset
/// that jumps tells of a part that is not kept live. An event `state` (`LogState`) says how far a followed build is, an
/// event `end` (`LogEnd`) that nothing more comes.
#[utoipa::path(get, path = "/builds/{id}/log", operation_id = "read_log", tag = "builds",
    params(("id" = i64, Path, description = "The build's number", minimum = 1), Which,
        ("Last-Event-ID" = Option<String>, Header, description = "The last event that was heard", pattern = "^([1-9][0-9]{0,17}:)?[0-9]{1,18}$")),
    responses((status = 200, description = "The log", content((String = "text/plain"), (LogPiece = "text/event-stream"))), Refusals))]
pub async fn read(
    _: Reader,
    State(api): State<Arc<Api>>,
    Number(id): Number,
    Query(which): Query<Which>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let seen =
        headers.get("last-event-id").map(|id| Seen::parse(id.to_str().unwrap_or_default())).transpose()?;
    let db = api.db().await;
    let build = known(&db, id).await?;
    let attempts = builds::attempts(&db, id).await?;
    drop(db);
    match choose(&build, &attempts, &which, seen)? {
        Answer::Follow(start) => Follower::answer(api, build, &attempts, start),
        Answer::Archived(candidates) => archived(&api, &build, &candidates, &headers).await,
    }
}

/// What a client has of a log. Who follows one attempt only need not name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    attempt: Option<i64>,
    offset: u64,
}

impl Seen {
    fn parse(id: &str) -> Result<Self, Problem> {
        let parsed = match id.split_once(':') {
            Some((attempt, offset)) => attempt.parse().ok().map(Some).zip(offset.parse().ok()),
            None => id.parse().ok().map(|offset| (None, offset)),
        };
        // Offsets are the database's, which has signed ones.
        match parsed {
            Some((attempt, offset)) if offset <= i64::MAX.unsigned_abs() => Ok(Self { attempt, offset }),
            _ => Err(Problem::bad_request("Last-Event-ID is not the id of an event of a log")),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Follow(Start),
    /// The first of these attempts that left a log.
    Archived(Vec<i64>),
}

fn choose(build: &Build, attempts: &[Attempt], which: &Which, seen: Option<Seen>) -> Result<Answer, Problem> {
    let named = which.attempt.or(seen.and_then(|seen| seen.attempt));
    if let Some(named) = named.filter(|named| attempts.iter().all(|attempt| attempt.id != *named)) {
        return Err(Problem::not_found(format!("build {} has no attempt {named}", build.id)));
    }
    let across = which.follow && which.attempt.is_none();
    let running = attempts.iter().find(|attempt| attempt.outcome.is_none()).map(|attempt| attempt.id);
    let begin = match (named, seen) {
        (Some(named), Some(_)) => Some(named),
        (Some(named), None) => running.filter(|running| *running == named),
        (None, Some(_)) if !across => running.or(attempts.last().map(|attempt| attempt.id)),
        (None, _) => running,
    };
    if begin.is_some() || across && build.is_open() {
        // What was seen of another attempt says nothing about this one.
        let seen = seen.filter(|seen| seen.attempt.is_none() || seen.attempt == begin);
        let offset = seen.map_or(0, |seen| seen.offset);
        return Ok(Answer::Follow(Start { attempt: begin, offset, across }));
    }
    match named {
        Some(named) => Ok(Answer::Archived(vec![named])),
        None => Ok(Answer::Archived(attempts.iter().rev().map(|attempt| attempt.id).collect())),
    }
}

async fn archived(
    api: &Api,
    build: &Build,
    candidates: &[i64],
    headers: &HeaderMap,
) -> Result<Response, Problem> {
    for attempt in candidates {
        let Some(object) = object(&build.drv_path, *attempt) else { continue };
        if let Some(response) = api.shelf.answer(&object, layout::LOG.content_type, headers).await? {
            return Ok(response);
        }
    }
    Err(Problem::not_found(format!("build {} has no log: {}", build.id, why_none(build, candidates))))
}

/// Where the log of an attempt is kept.
pub fn object(drv_path: &str, attempt: i64) -> Option<String> {
    store_path::parse(drv_path).ok().map(|drv| layout::log_of_attempt(&drv, attempt))
}

fn why_none(build: &Build, attempts: &[i64]) -> String {
    match (attempts, build.state.as_str(), build.root) {
        ([attempt], ..) => format!("attempt {attempt} left none"),
        ([_, ..], ..) => "no attempt at it left one".to_owned(),
        ([], "cached", _) => "it was there already".to_owned(),
        ([], "dep_failed", Some(root)) => format!("it was not tried, because of build {root}"),
        ([], ..) if build.is_open() => "it was not tried yet".to_owned(),
        ([], ..) => "it was not tried".to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn build(state: &str) -> Build {
        Build {
            id: 7,
            drv_path: String::new(),
            system: String::new(),
            features: Vec::new(),
            state: state.to_owned(),
            node: None,
            attempt: None,
            running_for: None,
            failure: None,
            error: None,
            root: None,
            created_at: String::new(),
            ended_at: None,
        }
    }

    fn attempt(id: i64, outcome: Option<&str>) -> Attempt {
        let (node, started_at, ended_at, message) = (None, String::new(), None, None);
        Attempt { id, node, started_at, ended_at, seconds: 0.0, outcome: outcome.map(str::to_owned), message }
    }

    fn answer(state: &str, attempts: &[Attempt], of: Option<i64>, follow: bool, seen: &str) -> Answer {
        let seen = (!seen.is_empty()).then(|| Seen::parse(seen).unwrap());
        choose(&build(state), attempts, &Which { attempt: of, follow }, seen).unwrap()
    }

    fn following(attempt: Option<i64>, offset: u64, across: bool) -> Answer {
        Answer::Follow(Start { attempt, offset, across })
    }

    #[test]
    fn what_runs_is_followed_and_what_ended_is_archived() {
        let running = [attempt(1, Some("interrupted")), attempt(2, None)];
        assert_eq!(answer("building", &running, None, false, ""), following(Some(2), 0, false));
        assert_eq!(answer("building", &running, Some(2), false, ""), following(Some(2), 0, false));
        assert_eq!(answer("building", &running, Some(1), false, ""), Answer::Archived(vec![1]));
        let ended = [attempt(1, Some("interrupted")), attempt(2, Some("succeeded"))];
        assert_eq!(answer("succeeded", &ended, None, false, ""), Answer::Archived(vec![2, 1]));
        assert_eq!(answer("ready", &ended[..1], None, false, ""), Answer::Archived(vec![1]));
    }

    #[test]
    fn whoever_follows_waits_for_what_is_open_and_reads_what_is_not() {
        assert_eq!(answer("blocked", &[], None, true, ""), following(None, 0, true));
        let ended = [attempt(1, Some("build_error"))];
        assert_eq!(answer("failed", &ended, None, true, ""), Answer::Archived(vec![1]));
        assert_eq!(answer("ready", &ended, Some(1), true, ""), Answer::Archived(vec![1]));
    }

    #[test]
    fn whoever_comes_back_goes_on_where_it_was() {
        let attempts = [attempt(1, Some("interrupted")), attempt(2, None)];
        assert_eq!(answer("building", &attempts, None, true, "1:30"), following(Some(1), 30, true));
        assert_eq!(answer("building", &attempts, None, false, "30"), following(Some(2), 30, false));
        assert_eq!(answer("ready", &attempts[..1], None, false, "30"), following(Some(1), 30, false));
        assert_eq!(answer("building", &attempts, Some(2), false, "1:30"), following(Some(2), 0, false));
    }

    #[test]
    fn an_attempt_at_something_else_is_none() {
        let which = Which { attempt: Some(3), follow: false };
        let problem = choose(&build("failed"), &[attempt(1, Some("oom"))], &which, None).unwrap_err();
        assert_eq!(problem.status(), 404);
    }

    #[test]
    fn only_ids_of_events_are_taken() {
        assert_eq!(Seen::parse("3:40").unwrap(), Seen { attempt: Some(3), offset: 40 });
        assert_eq!(Seen::parse("40").unwrap(), Seen { attempt: None, offset: 40 });
        for id in ["", ":", "1:", ":1", "a:1", "1:-1", "1:2:3", "99999999999999999999"] {
            assert!(Seen::parse(id).is_err(), "{id}");
        }
    }
}
