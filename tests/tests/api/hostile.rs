//! What builds and branches can be called and can print, on pages: shown as it is, and obeyed by nobody.

use harmonia_queue::evaluations::{self, Request};
use harmonia_queue::ingest::Ingest;
use harmonia_queue::people::{Project, put_project};
use harmonia_tests::farm::derivation;
use reqwest::{Method, StatusCode};

use super::desk::answer;
use super::pages::open_desk;
use super::reader::Reader;

const SCRIPT: &str = "<script>alert(1)</script>";

/// Every tag of a page is one of our own.
fn assert_harmless(page: &str) {
    let lower = page.to_lowercase();
    assert!(!lower.contains("<script>") && !lower.contains("<img src=x"), "{page}");
    assert!(!page.chars().any(|char| char.is_control() && char != '\n' && char != '\t'), "{page:?}");
}

#[tokio::test]
async fn names_of_projects_branches_and_attributes_are_only_text() {
    let desk = open_desk().await;
    let project = format!("a{SCRIPT}'\"");
    put_project(&desk.farm.frontend, &Project::new(&project)).await.unwrap();
    let branch = format!("{SCRIPT}\" onload=\"alert(1)");
    let mut ingest =
        Ingest::begin(&desk.farm.evaluator, &project, SCRIPT, Some(&branch), Some(SCRIPT), false)
            .await
            .unwrap();
    let node = derivation("leaf", &[]);
    let drv = node.drv_path.clone();
    ingest.add(vec![node]).await.unwrap();
    let id = desk.complete(ingest, &[(format!("checks.{SCRIPT}"), drv)]).await;
    desk.farm.settle().await;
    let asked = Request { project: &project, source: SCRIPT, branch: Some(SCRIPT), ..Request::default() };
    evaluations::queue(&desk.farm.frontend, &asked).await.unwrap();
    let reader = Reader::new(&desk);
    let escaped: String = project.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let job: i64 = desk.farm.value("SELECT max(id) FROM ci.job WHERE $1 = 0", 0).await;
    for path in [
        "/".to_owned(),
        "/queue".to_owned(),
        format!("/evals/{id}"),
        format!("/projects/{escaped}"),
        format!("/builds/{job}"),
        "/find?q=%3Cscript%3E".to_owned(),
    ] {
        let page = reader.page(&path).await;
        assert_harmless(&page);
        assert!(page.contains("&lt;script&gt;"), "{path}: {page}");
    }
}

#[tokio::test]
async fn a_log_of_html_and_escape_sequences_is_only_text() {
    let desk = open_desk().await;
    desk.farm.queue("main", &[("leaf", &[])]).await;
    let claim = desk.farm.claim(&desk.node).await;
    let text = format!(
        "{SCRIPT}\n<img src=x onerror=alert(1)>\n10%\r20%\r30%\n\x1b]0;title\x07\x1b[2J\x1b[31m</div>{SCRIPT}\n\x1b]8;;javascript:alert(1)\x1b\\link\n\x1b]never ends\nlast\n"
    );
    desk.archive(&claim.drv_path, claim.fence.attempt, text.as_bytes()).await;
    desk.farm.succeed(&desk.node, &claim).await;
    desk.farm.settle().await;
    let page = Reader::new(&desk).page(&format!("/builds/{}", claim.fence.job)).await;
    assert_harmless(&page);
    assert!(page.contains(">30%<") && page.contains(">link<") && page.contains(">last<"), "{page}");
    assert!(!page.contains("javascript:"), "{page}");
}

#[tokio::test]
async fn a_log_of_64_megabytes_is_a_page_like_others() {
    let desk = open_desk().await;
    desk.farm.queue("main", &[("leaf", &[])]).await;
    let claim = desk.farm.claim(&desk.node).await;
    let line = format!("{}\n", "a line of a log that does not end ".repeat(4));
    let text = line.repeat((64 << 20) / line.len()) + "the last line\n";
    desk.archive(&claim.drv_path, claim.fence.attempt, text.as_bytes()).await;
    desk.farm.succeed(&desk.node, &claim).await;
    desk.farm.settle().await;
    let reader = Reader::new(&desk);
    let build = reader.page(&format!("/builds/{}", claim.fence.job)).await;
    assert!(build.contains("the last line") && build.len() < 1 << 20, "{}", build.len());
    let place = |more: &str| format!("/builds/{}/log?{more}", claim.fence.job);
    let middle = reader.page(&place("line=200000")).await;
    assert!(middle.contains("id=\"L200000\"") && middle.len() < 1 << 20, "{}", middle.len());
    let found = reader.page(&place("find=the+last+line")).await;
    assert!(found.contains("1 lines with"), "{found}");
}

#[tokio::test]
async fn a_log_of_long_and_colourful_lines_is_a_page_that_a_browser_gets() {
    let desk = open_desk().await;
    desk.farm.queue("main", &[("leaf", &[])]).await;
    let claim = desk.farm.claim(&desk.node).await;
    let text = format!("{}\n", "\x1b[31m<\x1b[32m>".repeat(700)).repeat(1000) + "the last line\n";
    desk.archive(&claim.drv_path, claim.fence.attempt, text.as_bytes()).await;
    desk.farm.succeed(&desk.node, &claim).await;
    desk.farm.settle().await;
    let build = format!("/builds/{}", claim.fence.job);
    for (path, words) in [
        (build.clone(), ["too long for this page", "the last line"]),
        (format!("{build}/log"), ["Earlier lines", "the last line"]),
        (format!("{build}/log?line=1"), ["Later lines", "id=\"L1\""]),
        (format!("{build}/log?find=%1B"), ["or more", "lines with"]),
    ] {
        let page = Reader::new(&desk).page(&path).await;
        assert!(page.len() < 5 << 20 && words.iter().all(|words| page.contains(words)), "{path}");
        let packed = desk.ask(Method::GET, &path, None).header("accept-encoding", "gzip");
        let packed = answer(packed, StatusCode::OK).await;
        assert_eq!(packed.headers()["content-encoding"], "gzip", "{path}");
        assert!(packed.headers().contains_key("content-security-policy"));
    }
}

#[tokio::test]
async fn addresses_that_make_no_sense_get_a_page_that_says_so() {
    let desk = open_desk().await;
    let reader = Reader::new(&desk);
    for (path, status) in [
        ("/builds/0", 400),
        ("/builds/x", 400),
        ("/builds/99999999999999999999", 400),
        ("/builds/7777", 404),
        ("/evals/7777", 404),
        ("/evals/1?state=%00", 400),
        ("/projects/none", 404),
        ("/projects/main?after=x", 400),
        ("/nothing", 404),
        ("/builds/1/log?line=-1", 400),
    ] {
        let answer = reader.get(path).await;
        assert_eq!(answer.status(), status, "{path}");
        assert!(answer.headers()["content-type"].to_str().unwrap().starts_with("text/html"), "{path}");
        assert!(answer.headers().contains_key("content-security-policy"), "{path}");
        assert_harmless(&answer.text().await.unwrap());
    }
}
