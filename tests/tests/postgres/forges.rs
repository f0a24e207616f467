//! What forges say and are told: consent to outside changes, the outbox of statuses, pushes that nobody told us of.

use std::time::Duration;

use harmonia_queue::branches::{self, Forge, ProjectSource, Push};
use harmonia_queue::evaluations::{self, Stage};
use harmonia_queue::forges::{self, Comparison, Consent, Report, Repository};
use harmonia_queue::people::{self, Ending};
use harmonia_tests::farm::Farm;
use sqlx::{Connection, PgConnection};

use super::races::waits;

const INSTANCE: &str = "https://code.example.org";
const EVERY: Duration = Duration::from_secs(900);
const SOON: Option<Duration> = Some(Duration::from_secs(5));

async fn farm() -> (Farm, i32) {
    with_source(Farm::new().await).await
}

/// The same, where whoever waits for a lock gets an error.
async fn impatient() -> Farm {
    let farm = Farm::new().await;
    farm.forbid_waiting().await;
    with_source(farm).await.0
}

async fn with_source(farm: Farm) -> (Farm, i32) {
    farm.freeze().await;
    let project = farm.project("main").await;
    let (instance, owner, repo) = (format!("{INSTANCE}/"), "Acme".to_owned(), "dots".to_owned());
    let source = ProjectSource {
        forge: Forge::Gitea { instance, owner, repo },
        ..ProjectSource::git(format!("{INSTANCE}/acme/dots.git"))
    };
    branches::put_source(&farm.frontend, "main", Some(&source)).await.unwrap();
    (farm, project)
}

fn at<'a>(branch: &'a str, commit: &'a str) -> Push<'a> {
    let source = "https://code.example.org/acme/dots.git";
    Push { project: "main", source, branch, commit, untrusted: false, attrs: &[], pull_request: None }
}

async fn push(farm: &Farm, branch: &str, commit: &str) -> i64 {
    branches::push(&farm.frontend, &at(branch, commit)).await.unwrap().unwrap()
}

async fn push_after(farm: &Farm, commit: &str, known: Option<&str>) -> Option<i64> {
    branches::push_after(&farm.frontend, &at("main", commit), known).await.unwrap()
}

async fn stage(farm: &Farm, id: i64) -> Stage {
    evaluations::get(&farm.frontend, id).await.unwrap().unwrap().stage
}

async fn due(farm: &Farm) -> Vec<Report> {
    forges::due_reports(&farm.frontend, &[INSTANCE.to_owned()], 10).await.unwrap()
}

async fn one(farm: &Farm) -> Report {
    let mut due = due(farm).await;
    assert_eq!(due.len(), 1);
    due.remove(0)
}

async fn told(farm: &Farm, report: &Report, build: bool, words: &str) -> bool {
    forges::told(&farm.frontend, report, build, words).await.unwrap()
}

async fn end(farm: &Farm, report: &Report, next: Option<Duration>) -> bool {
    forges::end_report(&farm.frontend, report, next, None).await.unwrap()
}

async fn open(farm: &Farm) -> PgConnection {
    let login = farm.database.make_login("harmonia_frontend").await;
    let mut connection = PgConnection::connect(&login.direct_url).await.unwrap();
    sqlx::query("BEGIN").execute(&mut connection).await.unwrap();
    connection
}

async fn comparison(farm: &Farm) -> Option<Comparison> {
    forges::due_comparison(&farm.frontend, &[INSTANCE.to_owned()], EVERY).await.unwrap()
}

#[tokio::test]
async fn a_repository_is_found_by_its_name_in_any_case() {
    let (farm, project) = farm().await;
    let find = async |instance: &str, owner: &str, name: &str| {
        let repository = Repository { owner: owner.to_owned(), name: name.to_owned() };
        forges::followers(&farm.frontend, instance, &repository).await.unwrap()
    };
    assert_eq!(find(INSTANCE, "acme", "Dots").await[0].id, project);
    for (instance, owner, name) in
        [("https://github.com", "acme", "dots"), (INSTANCE, "acme", "' OR true --"), (INSTANCE, "%", "%")]
    {
        assert!(find(instance, owner, name).await.is_empty(), "{instance} {owner} {name}");
    }
}

#[tokio::test]
async fn a_delivery_is_known_by_any_of_its_keys_for_a_month() {
    let (farm, _) = farm().await;
    let key = |word: &str| vec![word.to_owned()];
    let seen =
        async |forge: &str, word: &str| forges::delivered(&farm.frontend, forge, &key(word)).await.unwrap();
    assert!(!seen("code", "id 1").await);
    for _ in 0..2 {
        let keys = [key("id 1"), key("body 2")].concat();
        forges::keep_delivery(&farm.frontend, "code", &keys).await.unwrap();
    }
    assert!(seen("code", "id 1").await && seen("code", "body 2").await);
    assert!(!seen("other", "id 1").await && !seen("code", "id 2").await);
    farm.advance(31.0 * 86_400.0).await;
    forges::prune_deliveries(&farm.frontend).await.unwrap();
    assert!(!seen("code", "id 1").await);
}

#[tokio::test]
async fn a_branch_that_is_gone_ends_what_it_has_not_finished() {
    let (farm, project) = farm().await;
    let (gone, other) = (push(&farm, "gone", "1").await, push(&farm, "other", "2").await);
    assert_eq!(forges::end_branch(&farm.frontend, project, "gone", "deleted", None).await.unwrap(), 1);
    assert_eq!((stage(&farm, gone).await, stage(&farm, other).await), (Stage::Cancelled, Stage::Queued));
    assert_eq!(branches::head(&farm.frontend, "main", "gone").await.unwrap(), None);
    assert_eq!(forges::end_branch(&farm.frontend, project, "gone", "deleted", None).await.unwrap(), 0);
}

#[tokio::test]
async fn a_branch_that_comes_back_at_the_same_commit_is_evaluated_again() {
    let (farm, project) = farm().await;
    let gone = push(&farm, "topic", "1").await;
    forges::end_branch(&farm.frontend, project, "topic", "deleted", None).await.unwrap();
    let back = push(&farm, "topic", "1").await;
    assert_eq!((stage(&farm, gone).await, stage(&farm, back).await), (Stage::Cancelled, Stage::Queued));
}

#[tokio::test]
async fn a_branch_that_was_pushed_to_meanwhile_is_not_gone() {
    let (farm, project) = farm().await;
    let id = push(&farm, "topic", "2").await;
    let end = async |known: &str| {
        forges::end_branch(&farm.frontend, project, "topic", "deleted", Some(known)).await.unwrap()
    };
    assert_eq!((end("1").await, stage(&farm, id).await), (0, Stage::Queued));
    assert_eq!((end("2").await, stage(&farm, id).await), (1, Stage::Cancelled));
}

async fn allow(farm: &Farm, project: i32, commit: &str, comment: i64) -> bool {
    let consent = Consent { commit, comment, by: "ann", written: None };
    forges::allow_pull_request(&farm.frontend, project, 7, &consent).await.unwrap()
}

#[tokio::test]
async fn consent_is_for_the_head_that_is_known() {
    let (farm, project) = farm().await;
    assert!(!allow(&farm, project, "1", 1).await, "nobody has seen it");
    forges::see_pull_request(&farm.frontend, project, 7, "1").await.unwrap();
    assert!(!allow(&farm, project, "2", 1).await);
    assert!(allow(&farm, project, "1", 1).await);
}

#[tokio::test]
async fn a_comment_is_used_once_and_a_new_push_needs_another() {
    let (farm, project) = farm().await;
    forges::see_pull_request(&farm.frontend, project, 7, "1").await.unwrap();
    assert!(allow(&farm, project, "1", 5).await);
    forges::see_pull_request(&farm.frontend, project, 7, "2").await.unwrap();
    for comment in [4, 5] {
        assert!(!allow(&farm, project, "2", comment).await, "{comment}");
    }
    assert!(allow(&farm, project, "2", 6).await);
}

#[tokio::test]
async fn consent_is_for_a_head_that_was_seen_before_the_comment_was_written() {
    let (farm, project) = farm().await;
    let early = forges::now(&farm.frontend).await.unwrap();
    farm.advance(10.0).await;
    forges::see_pull_request(&farm.frontend, project, 7, "1").await.unwrap();
    let allow = async |commit: &str, comment: i64, written: f64| {
        let consent = Consent { commit, comment, by: "ann", written: Some(written) };
        forges::allow_pull_request(&farm.frontend, project, 7, &consent).await.unwrap()
    };
    assert!(!allow("1", 1, early).await && !allow("1", 1, early + 10.0).await);
    farm.advance(10.0).await;
    forges::see_pull_request(&farm.frontend, project, 7, "1").await.unwrap();
    forges::still_open(&farm.frontend, project, 7).await.unwrap();
    assert!(allow("1", 1, early + 11.0).await, "that it is still there makes it no newer");
    farm.advance(10.0).await;
    forges::see_pull_request(&farm.frontend, project, 7, "2").await.unwrap();
    assert!(!allow("2", 2, early + 29.0).await);
    assert!(allow("2", 2, early + 31.0).await);
}

#[tokio::test]
async fn a_new_head_or_the_end_of_a_pull_request_cancels_what_it_had() {
    let (farm, project) = farm().await;
    for end_it in [true, false] {
        forges::see_pull_request(&farm.frontend, project, 7, "1").await.unwrap();
        let branch = forges::pull_request_ref(7);
        let id = push(&farm, &branch, "1").await;
        forges::see_pull_request(&farm.frontend, project, 7, "1").await.unwrap();
        assert_eq!(stage(&farm, id).await, Stage::Queued, "the same head is no news");
        if end_it {
            assert_eq!(forges::close_pull_request(&farm.frontend, project, 7).await.unwrap(), 1);
            assert_eq!(forges::pull_request_head(&farm.frontend, project, 7).await.unwrap(), None);
        } else {
            forges::see_pull_request(&farm.frontend, project, 7, "2").await.unwrap();
        }
        assert_eq!(stage(&farm, id).await, Stage::Cancelled);
    }
}

#[tokio::test]
async fn the_newest_evaluation_of_a_commit_speaks_for_it() {
    let (farm, _) = farm().await;
    push(&farm, "main", "1").await;
    let newer = push(&farm, "next", "1").await;
    let report = one(&farm).await;
    assert_eq!(
        (report.evaluation, report.commit.as_str(), report.instance.as_str()),
        (Some(newer), "1", INSTANCE)
    );
    assert_eq!(report.repository, Repository { owner: "Acme".to_owned(), name: "dots".to_owned() });
    farm.advance(61.0).await;
    farm.database.execute("UPDATE ci.evaluation SET commit_id = '2' WHERE branch = 'main'").await;
    farm.database.execute("UPDATE ci.evaluation SET commit_id = '1' WHERE branch = 'main'").await;
    let reports = due(&farm).await;
    assert_eq!(reports.iter().find(|report| report.commit == "1").unwrap().evaluation, Some(newer));
}

#[tokio::test]
async fn what_stands_for_nothing_any_more_lets_another_branch_speak_for_the_commit() {
    let (farm, project) = farm().await;
    let first = push(&farm, "main", "1").await;
    let told = async |expected: i64| {
        let reports = due(&farm).await;
        let report = reports.iter().find(|report| report.commit == "1").unwrap();
        assert_eq!(report.evaluation, Some(expected));
        assert!(end(&farm, report, None).await);
    };
    told(first).await;
    let second = push(&farm, "feature", "1").await;
    told(second).await;
    push(&farm, "feature", "2").await;
    told(first).await;
    let third = push(&farm, "topic", "1").await;
    told(third).await;
    forges::end_branch(&farm.frontend, project, "topic", "deleted", None).await.unwrap();
    told(first).await;
    // Nobody else is at it: it was ended, and that is said.
    push(&farm, "main", "3").await;
    let speaks: i64 =
        farm.value("SELECT evaluation_id FROM ci.report WHERE commit_id = '1' AND $1 = 0", 0).await;
    assert_eq!((speaks, stage(&farm, first).await), (first, Stage::Cancelled));
}

#[tokio::test]
async fn a_head_that_waits_for_consent_is_told_of_until_it_is_evaluated_or_gone() {
    let (farm, project) = farm().await;
    let wait = async |number: i32, commit: &str| {
        forges::see_pull_request(&farm.frontend, project, number, commit).await.unwrap();
        forges::wait_for_consent(&farm.frontend, project, commit).await.unwrap();
    };
    wait(7, "1").await;
    let waiting = one(&farm).await;
    assert_eq!((waiting.evaluation, waiting.commit.as_str()), (None, "1"));
    assert!(end(&farm, &waiting, None).await);
    let id = push(&farm, "main", "1").await;
    let evaluated = one(&farm).await;
    assert_eq!(evaluated.evaluation, Some(id));
    wait(7, "1").await;
    forges::see_pull_request(&farm.frontend, project, 7, "2").await.unwrap();
    assert!(end(&farm, &evaluated, None).await, "an evaluation's report stays");
    wait(8, "3").await;
    wait(8, "4").await;
    assert_eq!(one(&farm).await.commit, "4");
    forges::close_pull_request(&farm.frontend, project, 8).await.unwrap();
    farm.advance(61.0).await;
    assert!(due(&farm).await.is_empty());
}

#[tokio::test]
async fn nothing_is_told_of_a_project_without_a_forge() {
    let (farm, _) = farm().await;
    branches::put_source(&farm.frontend, "main", Some(&ProjectSource::git("https://h/x"))).await.unwrap();
    push(&farm, "main", "1").await;
    assert!(due(&farm).await.is_empty());
}

#[tokio::test]
async fn a_commit_is_one_frontends_until_its_lease_ends() {
    let (farm, _) = farm().await;
    push(&farm, "main", "1").await;
    let first = one(&farm).await;
    assert!(due(&farm).await.is_empty());
    farm.advance(59.0).await;
    assert!(due(&farm).await.is_empty());
    farm.advance(2.0).await;
    assert_eq!(one(&farm).await.turn, first.turn + 1);
}

#[tokio::test]
async fn whoever_lost_a_commit_is_not_heard() {
    let (farm, _) = farm().await;
    push(&farm, "main", "1").await;
    let lost = one(&farm).await;
    farm.advance(61.0).await;
    let kept = one(&farm).await;
    assert!(!told(&farm, &lost, false, "lost").await);
    assert!(told(&farm, &kept, false, "kept").await);
    farm.advance(61.0).await;
    assert_eq!(one(&farm).await.told_eval.as_deref(), Some("kept"));
}

#[tokio::test]
async fn whoever_lost_a_commit_does_not_give_it_back() {
    let (farm, _) = farm().await;
    push(&farm, "main", "1").await;
    let lost = one(&farm).await;
    farm.advance(61.0).await;
    one(&farm).await;
    assert!(!end(&farm, &lost, SOON).await);
    farm.advance(10.0).await;
    assert!(due(&farm).await.is_empty(), "it is somebody else's");
}

#[tokio::test]
async fn what_is_told_is_looked_at_again_in_its_time_or_never() {
    let (farm, _) = farm().await;
    push(&farm, "main", "1").await;
    let report = one(&farm).await;
    assert!(told(&farm, &report, true, "words").await);
    assert!(end(&farm, &report, SOON).await);
    assert!(due(&farm).await.is_empty());
    farm.advance(6.0).await;
    let report = one(&farm).await;
    assert_eq!((report.told_build.as_deref(), report.told_eval.as_deref()), (Some("words"), None));
    assert!(end(&farm, &report, None).await);
    farm.advance(86_400.0).await;
    assert!(due(&farm).await.is_empty());
}

#[tokio::test]
async fn what_was_evaluated_more_than_a_day_ago_is_old() {
    let (farm, _) = farm().await;
    let id = push(&farm, "main", "1").await;
    people::end_evaluation(&farm.evaluator, id, Ending::Aborted, None).await.unwrap();
    for (later, old) in [(80_000.0, false), (10_000.0, true)] {
        farm.advance(later).await;
        assert_eq!(one(&farm).await.is_old, old);
    }
}

#[tokio::test]
async fn what_is_built_again_is_told_again_even_if_it_was_being_told() {
    let (farm, _) = farm().await;
    let id = push(&farm, "main", "1").await;
    evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    let report = one(&farm).await;
    evaluations::rebuild_failed(&farm.frontend, id).await.unwrap();
    assert!(end(&farm, &report, None).await);
    let report = one(&farm).await;
    assert!(end(&farm, &report, None).await);
    assert!(due(&farm).await.is_empty());
    evaluations::rebuild_failed(&farm.frontend, id).await.unwrap();
    one(&farm).await;
}

#[tokio::test]
async fn a_forge_that_asks_for_patience_is_left_in_peace() {
    let (farm, _) = farm().await;
    push(&farm, "main", "1").await;
    forges::pause(&farm.frontend, INSTANCE, Duration::from_secs(100)).await.unwrap();
    forges::pause(&farm.frontend, INSTANCE, Duration::from_secs(1)).await.unwrap();
    farm.advance(99.0).await;
    assert!(due(&farm).await.is_empty());
    farm.advance(2.0).await;
    one(&farm).await;
}

#[tokio::test]
async fn failures_are_counted_until_it_goes_well() {
    let (farm, _) = farm().await;
    push(&farm, "main", "1").await;
    for failures in 0..3 {
        let report = one(&farm).await;
        assert_eq!(report.failures, failures);
        forges::end_report(&farm.frontend, &report, SOON, Some("away")).await.unwrap();
        farm.advance(6.0).await;
    }
    let report = one(&farm).await;
    assert!(end(&farm, &report, SOON).await);
    farm.advance(6.0).await;
    assert_eq!(one(&farm).await.failures, 0);
}

#[tokio::test]
async fn frontends_pass_over_what_another_is_taking() {
    let farm = impatient().await;
    push(&farm, "main", "1").await;
    let mut first = open(&farm).await;
    let take = sqlx::query("SELECT commit_id FROM ci.due_reports($1, 1)").bind(vec![INSTANCE.to_owned()]);
    assert_eq!(take.fetch_all(&mut first).await.unwrap().len(), 1);
    push(&farm, "next", "2").await;
    assert_eq!(one(&farm).await.commit, "2");
}

#[tokio::test]
async fn heads_are_compared_by_one_at_a_time_and_in_their_time() {
    let (farm, project) = farm().await;
    let due = comparison(&farm).await.unwrap();
    assert!(due.first && due.id == project && due.instance == INSTANCE);
    assert_eq!(comparison(&farm).await, None);
    forges::compared(&farm.frontend, project).await.unwrap();
    farm.advance(901.0).await;
    assert!(!comparison(&farm).await.unwrap().first);
    forges::compare_soon(&farm.frontend, EVERY).await.unwrap();
    assert_eq!(comparison(&farm).await, None, "it was just done");
    farm.advance(61.0).await;
    forges::compare_soon(&farm.frontend, EVERY).await.unwrap();
    assert!(comparison(&farm).await.is_some());
}

#[tokio::test]
async fn why_heads_could_not_be_compared_is_told_until_they_were() {
    let (farm, project) = farm().await;
    comparison(&farm).await.unwrap();
    let told = async || branches::source(&farm.frontend, "main").await.unwrap().unwrap().1;
    forges::not_compared(&farm.frontend, project, "it moved").await.unwrap();
    assert_eq!(told().await.as_deref(), Some("it moved"));
    forges::compared(&farm.frontend, project).await.unwrap();
    assert_eq!(told().await, None);
}

#[tokio::test]
async fn whoever_compares_is_passed_over() {
    let farm = impatient().await;
    comparison(&farm).await.unwrap();
    farm.advance(901.0).await;
    let mut first = open(&farm).await;
    let take = sqlx::query("SELECT FROM ci.due_comparison($1, '1 hour')").bind(vec![INSTANCE.to_owned()]);
    assert_eq!(take.fetch_all(&mut first).await.unwrap().len(), 1);
    assert_eq!(comparison(&farm).await, None);
}

#[tokio::test]
async fn a_push_that_was_missed_is_one() {
    let (farm, _) = farm().await;
    let missed = push_after(&farm, "1", None).await.unwrap();
    assert_eq!(push(&farm, "main", "1").await, missed);
    let newer = push_after(&farm, "2", Some("1")).await;
    assert!(newer.is_some_and(|newer| newer != missed));
}

#[tokio::test]
async fn what_the_forge_said_before_a_push_came_is_no_news() {
    let (farm, _) = farm().await;
    let newest = push(&farm, "main", "2").await;
    assert_eq!(push_after(&farm, "1", None).await, None);
    assert_eq!(stage(&farm, newest).await, Stage::Queued);
}

#[tokio::test]
async fn a_missed_push_meets_one_that_is_told() {
    let (farm, _) = farm().await;
    let mut telling = open(&farm).await;
    sqlx::query("SELECT ci.push('main', 'https://h/x', 'main', '2', 0::smallint, '{}')")
        .execute(&mut telling)
        .await
        .unwrap();
    let db = farm.frontend.clone();
    let finding =
        tokio::spawn(async move { branches::push_after(&db, &at("main", "1"), None).await.unwrap() });
    assert!(waits(&farm, &finding).await);
    sqlx::query("COMMIT").execute(&mut telling).await.unwrap();
    assert_eq!(finding.await.unwrap(), None);
}

#[tokio::test]
async fn branches_that_were_there_before_are_known_and_not_built() {
    let (farm, project) = farm().await;
    push(&farm, "main", "2").await;
    let heads = [("main".to_owned(), "1".to_owned()), ("next".to_owned(), "1".to_owned())];
    forges::see_heads(&farm.frontend, project, &heads).await.unwrap();
    let known = forges::heads(&farm.frontend, project).await.unwrap();
    assert_eq!((known["main"].as_str(), known["next"].as_str()), ("2", "1"));
    assert_eq!(due(&farm).await.len(), 1);
}
