//! What forges are told: the last state always, an unchanged one never twice, whoever dies meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use harmonia_queue::branches::{self, Forge, PullRequests, Push};
use harmonia_queue::evaluations;
use harmonia_queue::people::{self, Ending};
use harmonia_tests::eventually;
use harmonia_tests::farm::Farm;
use tokio::sync::oneshot;

use super::desk::Desk;
use super::recorder::{Plan, Recorder, Refusal, Step, Told, adopt};

const EVALUATIONS: usize = 200;
const ROUNDS: usize = 10;

async fn push(farm: &Farm, branch: &str, commit: &str) -> i64 {
    let source = "https://code.example.org/acme/dots";
    let push =
        Push { project: "main", source, branch, commit, untrusted: false, attrs: &[], pull_request: None };
    branches::push(&farm.frontend, &push).await.unwrap().unwrap()
}

/// Evaluated, with nothing to build.
async fn complete(farm: &Farm, evaluation: i64) {
    farm.value::<Option<String>>(
        "SELECT nullif(ci.complete_evaluation($1, '{}', '{}', '{}', '{}', '{}')::text, '')",
        evaluation,
    )
    .await;
}

fn of(told: &[Told], commit: &str, context: &str) -> Vec<(String, String)> {
    let of = |told: &&Told| told.commit == commit && told.context == format!("harmonia-ci/{context}");
    told.iter().filter(of).map(|told| (told.state.clone(), told.description.clone())).collect()
}

fn words(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(state, words)| ((*state).to_owned(), (*words).to_owned())).collect()
}

#[tokio::test]
async fn both_statuses_go_from_waiting_to_their_end() {
    let recorder = Recorder::start().await;
    let more = [("forges", recorder.gitea()), ("public_url", "https://ci.example.org/".to_owned())];
    let more = more.each_ref().map(|(name, value)| (*name, value.as_str()));
    let desk = Desk::with(Farm::new().await, &more).await;
    recorder.adopt(&desk.farm, PullRequests::default()).await;
    let id = push(&desk.farm, "main", "1").await;
    eventually("it is told to wait", || async { recorder.memory().told.len() == 2 }).await;
    evaluations::claim(&desk.farm.evaluator, "one").await.unwrap().unwrap();
    complete(&desk.farm, id).await;
    let told = || recorder.memory().told.clone();
    eventually("the end is told", || async { of(&told(), "1", "nix-build").len() == 2 }).await;
    let eval = of(&told(), "1", "nix-eval");
    assert_eq!(eval.first(), words(&[("pending", "waiting for an evaluator")]).first());
    assert_eq!(eval.last(), words(&[("success", "0 attributes")]).first());
    let expected = words(&[("pending", "waiting for the evaluation"), ("success", "nothing to build")]);
    assert_eq!(of(&told(), "1", "nix-build"), expected);
    assert_eq!(told()[0].page, format!("https://ci.example.org/evals/{id}"));
}

#[tokio::test]
async fn a_forge_that_asks_for_patience_gets_it_and_then_the_status() {
    let recorder = Recorder::start().await;
    let desk = Desk::with(Farm::new().await, &[("forges", &recorder.gitea())]).await;
    recorder.adopt(&desk.farm, PullRequests::default()).await;
    desk.farm.freeze().await;
    eventually("its heads were compared", || async { recorder.memory().requests >= 2 }).await;
    recorder.memory().refusals.push(Refusal { of: "statuses", status: 429, header: ("retry-after", "300") });
    let before = recorder.memory().requests;
    push(&desk.farm, "main", "1").await;
    eventually("it has asked", || async { recorder.memory().requests == before + 1 }).await;
    let paused = "SELECT count(*) FROM ci.forge_pause WHERE until > ci.clock() AND $1 = 0";
    eventually("the forge is left in peace", || async { desk.farm.value::<i64>(paused, 0).await == 1 }).await;
    desk.farm.advance(299.0).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(recorder.memory().requests, before + 1, "nothing is asked before its time");
    desk.farm.advance(2.0).await;
    eventually("it is told", || async { recorder.memory().told.len() == 2 }).await;
}

#[tokio::test]
async fn github_is_told_by_an_app_with_one_token_an_hour() {
    let recorder = Recorder::start().await;
    let desk = Desk::with(Farm::new().await, &[("forges", &recorder.github())]).await;
    let (owner, repo) = ("acme".to_owned(), "dots".to_owned());
    let forge = Forge::GitHub { instance: recorder.url.clone(), owner, repo };
    adopt(&desk.farm, "main", forge, PullRequests::default()).await;
    push(&desk.farm, "main", "1").await;
    push(&desk.farm, "next", "2").await;
    eventually("it is told", || async { recorder.memory().told.len() == 4 }).await;
    assert_eq!(recorder.memory().tokens, 1);
}

/// Three frontends, all killed at every step of a report, while 200 evaluations come to their end.
#[tokio::test]
async fn the_last_state_arrives_and_an_unchanged_one_is_not_told_twice_whoever_dies() {
    let recorder = Recorder::start().await;
    let mut desk = Desk::with(Farm::new().await, &[("forges", &recorder.gitea())]).await;
    recorder.adopt(&desk.farm, PullRequests::default()).await;
    desk.farm.freeze().await;
    let mut frontends = vec![desk.another().await, desk.another().await];
    let mut expected = BTreeMap::new();
    let mut open = Vec::new();
    for n in 0..EVALUATIONS {
        let commit = format!("{n:040x}");
        open.push((push(&desk.farm, &format!("branch-{n}"), &commit).await, commit));
    }
    while evaluations::claim(&desk.farm.evaluator, "one").await.unwrap().is_some() {}
    let mut killed = 0;
    for round in 0..ROUNDS {
        let (reached, is_reached) = oneshot::channel();
        let (go, gone) = oneshot::channel();
        let step = [Step::Before, Step::Between, Step::After][round % 3];
        let left = rand::random_range(1..EVALUATIONS / ROUNDS);
        recorder.memory().plan = Some(Plan { left, step, reached, go: gone });
        for (id, commit) in open.drain(..EVALUATIONS / ROUNDS) {
            if id % 2 == 0 {
                complete(&desk.farm, id).await;
                expected.insert(commit, ("success", "success"));
            } else {
                let ended =
                    people::end_evaluation(&desk.farm.frontend, id, Ending::Cancelled, Some("enough"));
                assert!(ended.await.unwrap());
                expected.insert(commit, ("error", "error"));
            }
        }
        // Everything is due, and no lease is over.
        desk.farm.advance(6.0).await;
        is_reached.await.unwrap();
        killed += frontends.len() + usize::from(round == 0);
        if round == 0 {
            desk.kill().await;
        }
        for frontend in frontends.drain(..) {
            frontend.abort();
            let _ = frontend.await;
        }
        let _ = go.send(());
        // Nobody lives who could lose a lease by this.
        desk.farm.advance(61.0).await;
        frontends = vec![desk.another().await, desk.another().await, desk.another().await];
    }
    let last = || {
        let mut last = BTreeMap::<String, (String, String)>::new();
        for told in &recorder.memory().told {
            let states = last.entry(told.commit.clone()).or_default();
            match told.context.as_str() {
                "harmonia-ci/nix-eval" => states.0 = told.state.clone(),
                _ => states.1 = told.state.clone(),
            }
        }
        last
    };
    let whole = || {
        let last = last();
        expected.iter().all(|(commit, (eval, build))| {
            last.get(commit).is_some_and(|(a, b)| (a.as_str(), b.as_str()) == (*eval, *build))
        })
    };
    eventually("every last state arrives", || async { whole() }).await;
    let mut before = BTreeMap::new();
    let told = recorder.memory().told.clone();
    let twice = told.iter().filter(|told| {
        let words = (told.state.clone(), told.description.clone(), told.page.clone());
        before.insert((told.commit.clone(), told.context.clone()), words.clone()) == Some(words)
    });
    let twice = twice.count();
    assert!(twice <= killed, "{twice} of {} were told twice by {killed} that died", told.len());
    // What is over is not looked at any more, and what is not due is not told.
    let requests = recorder.memory().told.len();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(recorder.memory().told.len(), requests);
    frontends.iter().for_each(|frontend| frontend.abort());
}
