//! Every page: whether it can be read by everybody, on every screen, and does what it may and no more.

use harmonia_tests::eventually;
use serde_json::Value;

use super::machine::Machine;
use super::stage::Stage;

/// How much of a page may move by itself while it is loaded; 0.1 is called good.
const SHIFT: f64 = 0.02;

const SHIFTED: &str = "return new Promise(tell => { let all = 0;
    new PerformanceObserver(list => list.getEntries().forEach(entry => { if (!entry.hadRecentInput) all += entry.value; }))
        .observe({ type: 'layout-shift', buffered: true });
    setTimeout(() => tell(all), 400); })";
const CHECK: &str = "return axe.run(document, { resultTypes: ['violations'] }).then(found => found.violations.map(violation =>
    violation.id + ': ' + violation.help + ' ' + violation.nodes.slice(0, 3).map(node => node.html.slice(0, 160)).join(' | ')))";
/// What colours alone can spoil.
const CONTRAST: &str = "resultTypes: ['violations'], runOnly: ['color-contrast']";

/// The accessibility checker, which `./dev` keeps.
fn axe() -> String {
    let file = std::env::var("HARMONIA_CI_TEST_AXE")
        .expect("HARMONIA_CI_TEST_AXE names axe.min.js: `./dev test browser` sets it");
    std::fs::read_to_string(file).unwrap()
}

/// Loaded once: everything is looked at in light, and the colours once more in dark.
async fn assert_good(stage: &Stage<'_>, path: &str, axe: &str) {
    let browser = &stage.browser;
    stage.open(path).await;
    let shift = browser.run(SHIFTED).await.as_f64().unwrap();
    assert!(shift <= SHIFT, "{path} moves by {shift} while it is loaded");
    browser.run(axe).await;
    let nothing = Value::Array(Vec::new());
    assert_eq!(browser.run(CHECK).await, nothing, "{path} in light");
    let wide = browser
        .run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
        .await;
    assert_eq!(wide.as_i64(), Some(0), "{path} is wider than the screen");
    browser.scheme("dark").await;
    let colours = browser.run(&CHECK.replace("resultTypes: ['violations']", CONTRAST)).await;
    assert_eq!(colours, nothing, "{path} in dark");
    browser.scheme("light").await;
    assert_eq!(browser.complaints().await, Vec::<String>::new(), "{path}");
}

#[tokio::test]
async fn every_page_is_good_on_a_screen_and_a_phone_in_light_and_dark() {
    let machine = Machine::new();
    let stage = Stage::new(&machine).await;
    for (project, shares) in [("website", "300"), ("dotfiles", "100")] {
        machine.does(&["project", "add", project, "--shares", shares]);
        stage.evaluate(&["--project", project, "--branch", "main", "--wait"]);
    }
    stage.evaluate(&["--project", "website", "--branch", "next", "--attr", "broken", "--wait"]);
    let (culprit, victim, top) = (stage.build("culprit"), stage.build("victim"), stage.build("everything"));
    stage.sign_in().await;
    let axe = axe();
    let pages = [
        ("/".to_owned(), "dashboard"),
        ("/projects/website".to_owned(), "project"),
        ("/evals/1".to_owned(), "evaluation"),
        ("/evals/3".to_owned(), "failures"),
        (format!("/builds/{culprit}"), "build"),
        (format!("/builds/{victim}"), "victim"),
        (format!("/builds/{top}"), "everything"),
        (format!("/builds/{culprit}/log"), "log"),
        ("/nodes".to_owned(), "nodes"),
        ("/queue".to_owned(), "queue"),
        ("/findings".to_owned(), "findings"),
        ("/admin".to_owned(), "admin"),
        ("/sign-in".to_owned(), "sign-in"),
        ("/find?q=nothing".to_owned(), "find"),
    ];
    stage.browser.scheme("light").await;
    for (width, height) in [(1280, 900), (390, 844)] {
        stage.browser.size(width, height).await;
        for (path, name) in &pages {
            assert_good(&stage, path, &axe).await;
            if width > 600 {
                stage.picture(name).await;
            } else if *name == "nodes" {
                stage.picture("nodes-phone").await;
            }
        }
    }
    stage.browser.scheme("dark").await;
    stage.browser.size(1280, 800).await;
    stage.open("/evals/1").await;
    stage.picture("evaluation-dark").await;
}

#[tokio::test]
async fn without_scripts_everything_can_be_read_and_done() {
    let machine = Machine::new();
    let stage = Stage::new(&machine).await;
    stage.evaluate(&["--attr", "broken", "--wait"]);
    let culprit = stage.build("culprit");
    stage.browser.without_scripts().await;
    stage.browser.open(&stage.invitation()).await;
    stage.browser.click("form.sign button").await;
    eventually("its log is on the page", || async {
        stage.open(&format!("/builds/{culprit}")).await;
        stage.browser.text().await.contains("this build fails, as it should")
    })
    .await;
    stage.browser.click(".actions button").await;
    assert!(stage.browser.url().await.ends_with(&format!("/builds/{culprit}")));
    stage.open("/nodes").await;
    stage.browser.click("button.danger").await;
    stage.reads("by hand").await;
}
