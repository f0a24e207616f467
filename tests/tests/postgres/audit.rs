//! The audit finds what is wrong, each kind of it.

use harmonia_queue::builder::Failure;
use harmonia_queue::people::{self, Project};
use harmonia_tests::farm::{Farm, name};

/// A job in every state; `job('name')` is its id.
async fn every_state() -> Farm {
    let (farm, _, node) = Farm::small(5).await;
    farm.put_project(Project { max_concurrent: Some(9), ..Project::new("main") }).await;
    farm.project("other").await;
    let leaves = ["bad", "done", "leaf", "run", "walk"];
    let mut graph: Vec<(&str, &[&str])> = leaves.iter().map(|&name| (name, &[][..])).collect();
    graph.extend([("above", &["bad"][..]), ("top", &["leaf"])]);
    farm.queue("main", &graph).await;
    for claim in node.claim(5).await.unwrap() {
        match name(&claim) {
            "bad" => assert!(node.fail(claim.fence, Failure::BuildError, "no").await.unwrap()),
            "done" => farm.succeed(&node, &claim).await,
            "leaf" => assert_eq!(node.give_back(&[claim.fence], "not now").await.unwrap().len(), 1),
            _ => {}
        }
    }
    farm.settle().await;
    farm.database
        .execute("CREATE FUNCTION job(text) RETURNS bigint LANGUAGE sql STABLE AS $$ SELECT id FROM ci.job WHERE drv_path LIKE '%-' || $1 || '.drv' $$")
        .await;
    farm
}

#[tokio::test]
async fn a_queue_in_every_state_is_sound() {
    every_state().await.assert_sound().await;
}

macro_rules! finds {
    ($($test:ident: $violation:literal after $corruption:literal;)*) => {$(
        #[tokio::test]
        async fn $test() {
            let farm = every_state().await;
            farm.database.execute($corruption).await;
            let found = people::audit(&farm.operator).await.unwrap();
            assert!(found.iter().any(|(violation, _)| violation == $violation), "{found:?}");
        }
    )*};
}

finds! {
    a_job_in_no_state_is_found: "an open job is not in exactly one of blocked, ready and running"
        after "DELETE FROM ci.offer WHERE job_id = job('leaf'); DELETE FROM ci.ready WHERE job_id = job('leaf')";
    a_job_in_two_states_is_found: "an open job is not in exactly one of blocked, ready and running"
        after "INSERT INTO ci.blocked (job_id, run_at) VALUES (job('run'), ci.clock())";
    an_ended_job_in_a_state_is_found: "an ended job is still ready"
        after "UPDATE ci.job SET state = 'failed' WHERE id = job('leaf')";
    a_job_that_is_ready_too_early_is_found: "a ready job has an input that is not there"
        after "INSERT INTO ci.job_input VALUES (job('leaf'), job('run'))";
    a_job_that_waits_for_nothing_is_found: "a blocked job waits for nothing"
        after "UPDATE ci.blocked SET watch = NULL WHERE job_id = job('top')";
    a_job_that_should_have_failed_is_found: "an open job has an input that failed"
        after "INSERT INTO ci.job_input VALUES (job('top'), job('bad'))";
    a_job_that_should_not_have_failed_is_found: "a dep-failed job has no input that failed"
        after "DELETE FROM ci.job_input WHERE referrer = job('above')";
    a_wrong_root_is_found: "a dep-failed job names a root that did not fail"
        after "UPDATE ci.job SET root = job('done') WHERE id = job('above')";
    a_stray_offer_is_found: "an offer of a job that is not ready"
        after "INSERT INTO ci.offer SELECT project_id, lane_id, urgency, evaluation_id, shortness, job('run') FROM ci.offer WHERE job_id = job('leaf')";
    a_missing_offer_is_found: "a ready job is not offered to a project that wants it"
        after "DELETE FROM ci.offer WHERE job_id = job('leaf')";
    an_offer_to_a_stranger_is_found: "a job is offered to a project that does not want it"
        after "INSERT INTO ci.lane (project_id, tier, class_id, active) SELECT p.id, 0, l.class_id, true FROM ci.lane l, ci.project p WHERE p.name = 'other' LIMIT 1;
               INSERT INTO ci.offer SELECT (SELECT id FROM ci.project WHERE name = 'other'), (SELECT max(id) FROM ci.lane), urgency, evaluation_id, shortness, job_id FROM ci.offer WHERE job_id = job('leaf')";
    an_offer_in_the_wrong_place_is_found: "an offer is out of order"
        after "UPDATE ci.offer SET shortness = 7 WHERE job_id = job('leaf')";
    a_lane_that_sleeps_on_an_offer_is_found: "an offer lies in a lane that nobody asks"
        after "UPDATE ci.lane SET active = false";
    a_job_that_nobody_wants_is_found: "an open job is wanted by nobody"
        after "DELETE FROM ci.want WHERE job_id = job('leaf')";
    a_success_without_a_record_is_found: "a succeeded job has an output that is not recorded"
        after "DELETE FROM ci.canonical";
    a_permit_for_nothing_is_found: "a permit is held for a job that does not run"
        after "UPDATE ci.permit SET job_id = job('done') WHERE n = 9";
    a_limited_job_without_a_permit_is_found: "a limited job runs without a permit"
        after "UPDATE ci.permit SET job_id = NULL";
    two_builds_of_one_path_are_found: "two open jobs make one path"
        after "UPDATE ci.output SET path = (SELECT path FROM ci.output WHERE job_id = job('leaf')) WHERE job_id = job('run')";
    a_session_over_its_slots_is_found: "a session builds more than its slots"
        after "UPDATE ci.session SET slots = 1";
    a_build_without_a_session_is_found: "a build runs for no session"
        after "UPDATE ci.running SET session_id = 4711";
}
