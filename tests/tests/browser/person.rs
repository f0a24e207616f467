//! What a person does with a farm: watch a log, rebuild a failure, drain a node, by mouse and by keyboard.

use harmonia_tests::eventually;

use super::machine::Machine;
use super::stage::Stage;

/// Keys as WebDriver writes them.
const TAB: &str = "\u{e004}";
const ENTER: &str = "\u{e007}";
const SPACE: &str = " ";

/// Goes from one control to the next until one is called so.
async fn tab_to(stage: &Stage<'_>, name: &str) {
    for _ in 0..80 {
        stage.browser.keys(TAB).await;
        let here = stage.browser.run("const it = document.activeElement; return it.getAttribute('aria-label') || it.innerText || it.name || ''").await;
        if here.as_str().unwrap_or_default().trim() == name {
            let seen = stage
                .browser
                .run("return getComputedStyle(document.activeElement).outlineStyle !== 'none'")
                .await;
            assert_eq!(seen, true, "where the keyboard is can be seen at {name}");
            return;
        }
    }
    panic!("no way to {name} by keyboard: {}", stage.browser.text().await);
}

#[tokio::test]
async fn a_log_is_watched_while_it_is_written() {
    let machine = Machine::new();
    let stage = Stage::new(&machine).await;
    // It begins once somebody looks.
    machine.does(&["drain"]);
    stage.evaluate(&["--attr", "slow"]);
    eventually("the build is known", || async { machine.verb(&["why", "slow"]).1 == 0 }).await;
    let slow = stage.build("slow");
    stage.open(&format!("/builds/{slow}")).await;
    machine.does(&["drain", "--undo"]);
    stage.reads("second 2 of 5").await;
    stage.reads("second 5 of 5").await;
    stage.reads("It was built").await;
    stage.reads("of attempt").await;
    let line = stage.browser.run("return document.querySelector('#L2').innerText").await;
    assert!(line.as_str().unwrap().contains("second 2 of 5"), "{line}");
    stage.browser.click("#L2 a").await;
    assert!(stage.browser.url().await.ends_with("#L2"));
    assert_eq!(stage.browser.complaints().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_failure_is_rebuilt_and_everybody_sees_it() {
    let machine = Machine::new();
    let stage = Stage::new(&machine).await;
    stage.evaluate(&["--attr", "broken", "--wait"]);
    let culprit = stage.build("culprit");
    stage.sign_in().await;
    stage.open(&format!("/builds/{culprit}")).await;
    stage.browser.run("window.unchanged = true").await;
    // Somebody else does it: this page has to hear of it by itself.
    machine.does(&["rebuild", &culprit.to_string()]);
    eventually("the second attempt is seen", || async {
        stage.browser.run("return document.querySelectorAll('[aria-label=Attempts] tbody tr').length").await
            == 2
    })
    .await;
    assert_eq!(stage.browser.run("return window.unchanged").await, true, "the page was not loaded again");
    eventually("the rebuild has ended", || async { machine.does(&["why", "culprit"]).contains("is failed") })
        .await;
    stage.reads("Rebuild").await;
    stage.browser.click(".actions button").await;
    eventually("the third attempt is seen", || async {
        stage.browser.run("return document.querySelectorAll('[aria-label=Attempts] tbody tr').length").await
            == 3
    })
    .await;
}

/// Whoever looks sees what others do, on every page that changes, and nothing is loaded again.
#[tokio::test]
async fn what_others_do_is_seen_without_a_reload() {
    let machine = Machine::new();
    let stage = Stage::new(&machine).await;
    stage.evaluate(&["--attr", "slow", "--branch", "main", "--wait"]);
    stage.sign_in().await;
    let deeds: [(&str, &dyn Fn(), &str); 4] = [
        ("/evals/1", &|| drop(machine.does(&["pin", "1"])), "pinned"),
        ("/", &|| drop(machine.does(&["project", "add", "website"])), "website"),
        (
            "/projects/default",
            &|| drop(stage.evaluate(&["--attr", "slow", "--branch", "next", "--wait"])),
            "next",
        ),
        ("/nodes", &|| drop(machine.does(&["drain"])), "by hand"),
    ];
    for (path, deed, words) in deeds {
        stage.open(path).await;
        stage.browser.run("window.unchanged = true").await;
        deed();
        stage.reads(words).await;
        assert_eq!(stage.browser.run("return window.unchanged").await, true, "{path} was loaded again");
    }
}

#[tokio::test]
async fn a_node_is_drained_by_keyboard_alone() {
    let machine = Machine::new();
    let stage = Stage::new(&machine).await;
    stage.browser.open(&stage.invitation()).await;
    tab_to(&stage, "Sign in on this machine").await;
    stage.browser.keys(ENTER).await;
    stage.reads("Sign out").await;
    tab_to(&stage, "Nodes").await;
    stage.browser.keys(ENTER).await;
    stage.reads("Pool local").await;
    let name = stage.browser.run("return document.querySelector('td').innerText").await;
    tab_to(&stage, &format!("Drain {}", name.as_str().unwrap())).await;
    stage.browser.keys(SPACE).await;
    stage.reads("by hand").await;
    assert!(machine.does(&["nodes"]).contains("drained"));
    tab_to(&stage, &format!("Resume {}", name.as_str().unwrap())).await;
    stage.browser.keys(ENTER).await;
    stage.reads("active").await;
}
