//! The web pages, as a browser without scripts reads them.

use harmonia_queue::builder::{Failure, LogPiece};
use harmonia_tests::eventually;
use harmonia_tests::farm::Farm;
use reqwest::StatusCode;

use super::desk::{Desk, answer};
use super::reader::Reader;
use super::sse::Stream;

/// Where nobody has to sign in to look.
pub async fn open_desk() -> Desk {
    Desk::with(Farm::new().await, &[("anonymous_read", "true")]).await
}

#[tokio::test]
async fn every_page_is_there_and_says_what_it_should() {
    let desk = open_desk().await;
    let evaluation = desk.farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    let (leaf, top) = (evaluation["leaf"], evaluation["top"]);
    desk.farm.claim(&desk.node).await;
    let reader = Reader::new(&desk);
    for (path, words) in [
        ("/".to_owned(), vec!["leaf", "main", "Running now", "owed"]),
        ("/projects/main".to_owned(), vec!["Branches", "Evaluations"]),
        (
            format!("/evals/{}", evaluation.id),
            vec!["1 running, 1 waiting", "Dependency graph", "What it waited for"],
        ),
        (format!("/builds/{leaf}"), vec!["It is building on node", "Needed by 1", "top"]),
        (format!("/builds/{top}"), vec!["It waits for 1 inputs", "Why it is not running", "Needs 1"]),
        (format!("/builds/{leaf}/log"), vec!["No attempt has left a log yet"]),
        ("/nodes".to_owned(), vec!["Pool pool", "1/4", "leaf"]),
        ("/queue".to_owned(), vec!["leaf", "Nothing waits for a builder."]),
        ("/findings".to_owned(), vec!["None: whatever was built twice"]),
        ("/find?q=nothing".to_owned(), vec!["Nothing is called"]),
        ("/sign-in".to_owned(), vec!["Token"]),
    ] {
        let page = reader.page(&path).await;
        for words in words {
            assert!(page.contains(words), "{path} does not say {words:?}:\n{page}");
        }
        assert!(!page.contains("<form class=\"act\""), "{path} has buttons for nobody");
    }
}

#[tokio::test]
async fn the_page_of_a_build_is_there_though_its_log_cannot_be_read() {
    let desk = open_desk().await;
    desk.farm.queue("main", &[("leaf", &[])]).await;
    let claim = desk.farm.claim(&desk.node).await;
    desk.archive_unreadable(&claim.drv_path, claim.fence.attempt).await;
    desk.farm.succeed(&desk.node, &claim).await;
    desk.farm.settle().await;
    let page = Reader::new(&desk).page(&format!("/builds/{}", claim.fence.job)).await;
    assert!(page.contains("Attempts") && page.contains("The log cannot be read now"), "{page}");
}

#[tokio::test]
async fn pages_allow_nothing_but_our_own_files() {
    let desk = open_desk().await;
    let answer = Reader::new(&desk).get("/").await;
    let policy = answer.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(answer.headers()["x-content-type-options"], "nosniff");
    assert_eq!(answer.headers()["cache-control"], "no-store");
    let page = answer.text().await.unwrap();
    assert!(!page.contains("style=\"") && !page.contains("<style") && !page.contains("onclick"), "{page}");
    for script in page.split("<script").skip(1) {
        assert!(script.starts_with(" defer src=\"/assets/"), "{script}");
    }
}

#[tokio::test]
async fn files_are_kept_for_ever_and_packed() {
    let desk = open_desk().await;
    let reader = Reader::new(&desk);
    let page = reader.page("/").await;
    let from = page.find("/assets/").unwrap();
    let style =
        page[page.find("stylesheet").unwrap()..].split("href=\"").nth(1).unwrap().split('"').next().unwrap();
    assert!(from > 0);
    let first = answer(desk.get(style).header("accept-encoding", "gzip"), StatusCode::OK).await;
    assert_eq!(first.headers()["content-encoding"], "gzip");
    assert!(first.headers()["cache-control"].to_str().unwrap().contains("immutable"));
    let tag = first.headers()["etag"].clone();
    answer(desk.get(style).header("if-none-match", tag), StatusCode::NOT_MODIFIED).await;
    answer(desk.get("/assets/0000000000000000-style.css"), StatusCode::NOT_FOUND).await;
    let packed = answer(desk.get("/").header("accept-encoding", "gzip"), StatusCode::OK).await;
    assert_eq!(packed.headers()["content-encoding"], "gzip");
}

#[tokio::test]
async fn a_failure_names_its_root_and_shows_its_log() {
    let desk = open_desk().await;
    let evaluation = desk.farm.queue("main", &[("culprit", &[]), ("victim", &["culprit"])]).await;
    let claim = desk.farm.claim(&desk.node).await;
    desk.archive(&claim.drv_path, claim.fence.attempt, b"one\n\x1b[31mbroken\x1b[0m\n").await;
    desk.node.fail(claim.fence, Failure::BuildError, "exit 3").await.unwrap();
    desk.farm.settle().await;
    let reader = Reader::new(&desk);
    let victim = reader.page(&format!("/builds/{}", evaluation["victim"])).await;
    assert!(victim.contains("The root of it") && victim.contains("exit 3"), "{victim}");
    let culprit = reader.page(&format!("/builds/{}", evaluation["culprit"])).await;
    assert!(
        culprit.contains("<span class=\"f1\">broken</span>") && culprit.contains("id=\"L2\""),
        "{culprit}"
    );
    let found = reader.page(&format!("/builds/{}/log?find=BROKEN", evaluation["culprit"])).await;
    assert!(found.contains("1 lines with") && found.contains("&amp;line=2#L2"), "{found}");
}

#[tokio::test]
async fn what_newly_fails_and_what_is_fixed_is_said() {
    let desk = open_desk().await;
    let build = async |graph: [(&str, bool); 2]| {
        let names: Vec<(&str, &[&str])> = graph.iter().map(|(name, _)| (*name, &[][..])).collect();
        let mut ingest = desk.farm.begin("main").await;
        let nodes: Vec<_> =
            names.iter().map(|(name, _)| harmonia_tests::farm::derivation(name, &[])).collect();
        let drvs: Vec<String> = nodes.iter().map(|node| node.drv_path.clone()).collect();
        ingest.add(nodes).await.unwrap();
        let attrs: Vec<_> =
            ["a", "b"].iter().zip(&drvs).map(|(attr, drv)| ((*attr).to_owned(), drv.clone())).collect();
        let id = desk.complete(ingest, &attrs).await;
        desk.farm.settle().await;
        for _ in 0..2 {
            let claim = desk.farm.claim(&desk.node).await;
            let good = graph.iter().any(|(name, good)| *good && claim.drv_path.contains(name));
            match good {
                true => desk.farm.succeed(&desk.node, &claim).await,
                false => drop(desk.node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap()),
            }
            desk.farm.settle().await;
        }
        id
    };
    build([("a-one", true), ("b-one", false)]).await;
    let second = build([("a-two", false), ("b-two", true)]).await;
    let page = Reader::new(&desk).page(&format!("/evals/{second}")).await;
    assert!(page.contains("Newly failing 1") && page.contains("Newly fixed 1"), "{page}");
}

#[tokio::test]
async fn a_page_hears_of_a_claim_and_a_log_of_its_lines() {
    let desk = open_desk().await;
    desk.farm.queue("main", &[("leaf", &[])]).await;
    let mut page = Stream::open(desk.get("/live").header("cookie", "")).await;
    let claim = desk.farm.claim(&desk.node).await;
    assert_eq!(page.next().await.unwrap().kind, "changed");

    let place = format!("/builds/{}/log/live", claim.fence.job);
    let mut log = Stream::open(desk.get(&place)).await;
    assert_eq!(log.next().await.unwrap().kind, "whole");
    let piece = LogPiece { fence: claim.fence, offset: 0, data: b"<b>one</b>\n".to_vec() };
    desk.node.log_append(&[piece]).await.unwrap();
    // As further lines, or with all of them, if the first look at the log found it.
    let lines = loop {
        let event = log.next().await.unwrap();
        let lines = event.data.as_str().unwrap().to_owned();
        if lines.contains("one") {
            break lines;
        }
    };
    assert!(lines.contains("&lt;b&gt;one") && lines.contains("L1"), "{lines}");
    desk.farm.succeed(&desk.node, &claim).await;
    desk.farm.settle().await;
    while log.next().await.expect("it says that it ended").kind != "end" {}
}

#[tokio::test]
async fn lists_go_on_behind_a_key() {
    let desk = open_desk().await;
    for _ in 0..31 {
        desk.farm.evaluate("main", &[("leaf", &[])]).await;
    }
    let reader = Reader::new(&desk);
    let page = reader.page("/projects/main").await;
    let next = page
        .split("rel=\"next\"")
        .next()
        .unwrap()
        .rsplit("href=\"")
        .next()
        .unwrap()
        .split('"')
        .next()
        .unwrap();
    let rest = reader.page(&next.replace("&amp;", "&")).await;
    assert_eq!(rest.matches("<td><a href=\"/evals/").count(), 1, "{rest}");
    assert!(!rest.contains("rel=\"next\""));
}

#[tokio::test]
async fn a_button_is_seen_by_whoever_looks() {
    let desk = open_desk().await;
    let reader = Reader::signed_in(&desk, &desk.operate).await;
    let node = desk.farm.node_of(&desk.node).await;
    let answer = reader.press("/nodes", &format!("/nodes/{node}/drain"), &[]).await;
    assert_eq!((answer.status().as_u16(), answer.headers()["location"].to_str().unwrap()), (303, "/nodes"));
    let page = Reader::new(&desk).page("/nodes").await;
    assert!(page.contains("drained") && page.contains("by hand"), "{page}");
    reader.press("/nodes", &format!("/nodes/{node}/resume"), &[]).await;
    eventually("it claims again", async || reader.page("/nodes").await.contains(">active<")).await;
}

#[tokio::test]
async fn an_admin_makes_projects_and_tokens() {
    let desk = open_desk().await;
    let reader = Reader::signed_in(&desk, &desk.admin).await;
    reader.press("/admin", "/admin/projects", &[("new", "true"), ("name", "dots"), ("shares", "250")]).await;
    assert!(reader.page("/admin").await.contains("value=\"250\""));
    let made = reader.press("/admin", "/admin/tokens", &[("name", "laptop"), ("scope", "read")]).await;
    let page = made.text().await.unwrap();
    let secret = page.split("<pre").nth(1).unwrap().split('>').nth(1).unwrap().split('<').next().unwrap();
    answer(desk.ask(reqwest::Method::GET, "/api/queue", Some(secret)), StatusCode::OK).await;
    reader.press("/admin", "/admin/tokens/revoke", &[("name", "laptop")]).await;
    assert!(!reader.page("/admin").await.contains("laptop"));
    let refused = reader.press("/admin", "/admin/projects", &[("name", "dots"), ("shares", "many")]).await;
    assert_eq!(refused.status(), 400);
}

#[tokio::test]
async fn an_evaluation_is_pinned_and_let_go_by_whoever_operates() {
    let desk = Desk::new().await;
    let id = desk.farm.queue("main", &[("a", &[])]).await.id;
    let (operator, reader) =
        (Reader::signed_in(&desk, &desk.operate).await, Reader::signed_in(&desk, &desk.read).await);
    let page = format!("/evals/{id}");
    assert!(!reader.page("/projects/main").await.contains("Pinned"));
    assert_eq!(reader.press("/queue", &format!("{page}/pin"), &[]).await.status(), 403);
    let answer = operator.press(&page, &format!("{page}/pin"), &[]).await;
    assert_eq!(answer.headers()["location"].to_str().unwrap(), page);
    let seen = operator.page(&page).await;
    assert!(seen.contains(">pinned<") && seen.contains("/unpin"), "{seen}");
    assert!(!reader.page(&page).await.contains("/unpin"));
    assert!(reader.page("/projects/main").await.contains("Pinned"));
    operator.press(&page, &format!("{page}/unpin"), &[]).await;
    assert!(!operator.page(&page).await.contains(">pinned<"));
}
