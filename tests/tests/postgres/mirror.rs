//! Projects and pools that custom resources keep, and what their status shows.

use harmonia_queue::leader::Leadership;
use harmonia_queue::mirror::{self, PoolCounts, Resource};
use harmonia_queue::people::{self, Pool, Project};
use harmonia_queue::{Error, projects};
use harmonia_tests::farm::{Farm, SYSTEM, derivation};

const NAME: &str = "ci/dotfiles";

fn at(generation: i64) -> Resource<'static> {
    Resource { uid: "one", generation }
}

fn shares(shares: i32) -> Project<'static> {
    Project { shares, ..Project::new(NAME) }
}

fn slots(slots: i32) -> Pool<'static> {
    Pool {
        name: "ci/x86",
        login: "pool_ci_x86",
        systems: vec![SYSTEM.to_owned()],
        features: None,
        mandatory_features: Vec::new(),
        slots,
        memory: 0,
    }
}

async fn leading() -> (Farm, Leadership) {
    let farm = Farm::new().await;
    let lead = farm.operate().await;
    (farm, lead)
}

async fn mirror(farm: &Farm, lead: &Leadership, resource: Resource<'_>, project: Project<'_>) -> bool {
    mirror::project(&farm.operator, lead.generation, resource, &project).await.unwrap()
}

async fn mirror_pool(farm: &Farm, lead: &Leadership, resource: Resource<'_>, slots: Pool<'_>) -> bool {
    mirror::pool(&farm.operator, lead.generation, resource, &slots).await.unwrap()
}

async fn shares_now(farm: &Farm) -> Option<i32> {
    projects::get(&farm.operator, NAME).await.unwrap().map(|project| project.shares)
}

async fn slots_now(farm: &Farm) -> i32 {
    farm.value("SELECT slots FROM ci.pool WHERE deleted_at IS NULL AND id > $1", 0).await
}

fn refusal<T: std::fmt::Debug>(answer: Result<T, Error>) -> String {
    match answer.unwrap_err() {
        Error::WrongState(sentence) => sentence,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_project_is_as_its_resource_says() {
    let (farm, lead) = leading().await;
    assert!(mirror(&farm, &lead, at(1), shares(200)).await);
    assert_eq!(shares_now(&farm).await, Some(200));
    assert!(mirror(&farm, &lead, at(2), shares(300)).await);
    assert_eq!(shares_now(&farm).await, Some(300));
}

#[tokio::test]
async fn an_older_generation_changes_nothing() {
    let (farm, lead) = leading().await;
    mirror(&farm, &lead, at(2), shares(200)).await;
    assert!(!mirror(&farm, &lead, at(1), shares(100)).await);
    assert_eq!(shares_now(&farm).await, Some(200));
}

#[tokio::test]
async fn a_resource_that_was_made_anew_takes_over() {
    let (farm, lead) = leading().await;
    mirror(&farm, &lead, at(7), shares(200)).await;
    assert!(mirror(&farm, &lead, Resource { uid: "two", generation: 1 }, shares(100)).await);
    assert_eq!(shares_now(&farm).await, Some(100));
}

#[tokio::test]
async fn who_was_followed_by_another_removes_nothing() {
    let (farm, lead) = leading().await;
    mirror(&farm, &lead, at(7), shares(200)).await;
    mirror(&farm, &lead, Resource { uid: "two", generation: 1 }, shares(100)).await;
    assert!(!mirror::project_gone(&farm.operator, lead.generation, "one", NAME).await.unwrap());
    assert_eq!(shares_now(&farm).await, Some(100));
}

#[tokio::test]
async fn a_project_goes_with_its_resource_and_its_history_stays() {
    let (farm, lead) = leading().await;
    mirror(&farm, &lead, at(1), Project::new(NAME)).await;
    let jobs = farm.queue(NAME, &[("leaf", &[])]).await;
    assert!(mirror::project_gone(&farm.operator, lead.generation, "one", NAME).await.unwrap());
    farm.settle().await;
    assert_eq!(shares_now(&farm).await, None);
    assert_eq!(farm.state(jobs["leaf"]).await, "cancelled");
    let kept = "SELECT state::text FROM ci.evaluation WHERE id = $1";
    assert_eq!(farm.value::<String>(kept, jobs.id).await, "cancelled");
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_went_with_its_resource_does_not_come_back() {
    let (farm, lead) = leading().await;
    mirror(&farm, &lead, at(1), shares(100)).await;
    mirror::project_gone(&farm.operator, lead.generation, "one", NAME).await.unwrap();
    assert!(!mirror(&farm, &lead, at(1), shares(100)).await);
    assert_eq!(shares_now(&farm).await, None);
    assert!(mirror(&farm, &lead, Resource { uid: "two", generation: 1 }, shares(100)).await);
}

#[tokio::test]
async fn people_do_not_change_what_a_resource_keeps() {
    let (farm, lead) = leading().await;
    mirror(&farm, &lead, at(1), shares(200)).await;
    let sentence = refusal(people::put_project(&farm.frontend, &shares(1)).await);
    assert_eq!(
        sentence,
        "project ci/dotfiles is kept by the Project dotfiles in namespace ci: change it there"
    );
    assert_eq!(shares_now(&farm).await, Some(200));
}

#[tokio::test]
async fn people_do_not_remove_what_a_resource_keeps() {
    let (farm, lead) = leading().await;
    mirror(&farm, &lead, at(1), shares(200)).await;
    let sentence = refusal(people::remove_project(&farm.frontend, NAME).await);
    assert!(sentence.contains("kept by the Project dotfiles in namespace ci"), "{sentence}");
    assert_eq!(shares_now(&farm).await, Some(200));
}

#[tokio::test]
async fn a_resource_does_not_take_what_people_made() {
    let (farm, lead) = leading().await;
    farm.put_project(shares(5)).await;
    let sentence = refusal(mirror::project(&farm.operator, lead.generation, at(1), &shares(200)).await);
    assert!(sentence.contains("there is a project ci/dotfiles that no Project keeps"), "{sentence}");
    assert_eq!(shares_now(&farm).await, Some(5));
    people::remove_project(&farm.frontend, NAME).await.unwrap();
    assert!(mirror(&farm, &lead, at(1), shares(200)).await);
}

#[tokio::test]
async fn people_may_take_the_name_of_a_resource_that_is_gone() {
    let (farm, lead) = leading().await;
    mirror(&farm, &lead, at(1), Project { pools: Some(vec!["ci/x86".into()]), ..shares(200) }).await;
    mirror::project_gone(&farm.operator, lead.generation, "one", NAME).await.unwrap();
    people::put_project(&farm.frontend, &shares(1)).await.unwrap();
    farm.settle().await;
    let project = projects::get(&farm.operator, NAME).await.unwrap().unwrap();
    assert_eq!((project.shares, project.pools), (1, None));
}

#[tokio::test]
async fn who_leads_no_more_changes_nothing() {
    let (farm, lead) = leading().await;
    mirror(&farm, &lead, at(1), shares(200)).await;
    mirror_pool(&farm, &lead, at(1), slots(2)).await;
    let before = farm.digest().await;
    let (db, former) = (&farm.operator, lead.generation - 1);
    let answers = [
        mirror::project(db, former, at(2), &shares(1)).await,
        mirror::project_gone(db, former, "one", NAME).await,
        mirror::pool(db, former, at(2), &slots(1)).await,
        mirror::pool_gone(db, former, "one", "ci/x86").await,
    ];
    for answer in answers {
        assert!(matches!(answer, Err(Error::NotLeader(_))), "{answer:?}");
    }
    assert_eq!(farm.digest().await, before);
}

#[tokio::test]
async fn a_pool_may_come_after_the_project_that_names_it() {
    let (farm, lead) = leading().await;
    let other = farm.pool("ci/other", &[SYSTEM], 1).await;
    let named = Project { pools: Some(vec!["ci/late".into()]), ..Project::new(NAME) };
    mirror(&farm, &lead, at(1), named).await;
    let elsewhere = farm.node(&other, "elsewhere").await;
    farm.queue(NAME, &[("leaf", &[])]).await;
    let counts = mirror::project_counts(&farm.operator).await.unwrap();
    assert_eq!(counts[0].missing_pools, ["ci/late"]);
    assert!(elsewhere.claim(1).await.unwrap().is_empty());

    let late = farm.pool("ci/late", &[SYSTEM], 1).await;
    let here = farm.node(&late, "here").await;
    farm.settle().await;
    assert!(elsewhere.claim(1).await.unwrap().is_empty());
    assert_eq!(here.claim(1).await.unwrap().len(), 1);
    assert!(mirror::project_counts(&farm.operator).await.unwrap()[0].missing_pools.is_empty());
}

#[tokio::test]
async fn an_older_generation_of_a_pool_changes_nothing() {
    let (farm, lead) = leading().await;
    mirror_pool(&farm, &lead, at(2), slots(2)).await;
    assert!(!mirror_pool(&farm, &lead, at(1), slots(1)).await);
    assert_eq!(slots_now(&farm).await, 2);
    assert!(mirror_pool(&farm, &lead, Resource { uid: "two", generation: 1 }, slots(3)).await);
    assert_eq!(slots_now(&farm).await, 3);
}

#[tokio::test]
async fn a_resource_does_not_take_a_pool_that_it_did_not_make() {
    let (farm, lead) = leading().await;
    people::put_pool(&farm.operator, &slots(5)).await.unwrap();
    let sentence = refusal(mirror::pool(&farm.operator, lead.generation, at(1), &slots(2)).await);
    assert!(sentence.contains("there is a pool ci/x86 that no BuilderPool keeps"), "{sentence}");
    assert_eq!(slots_now(&farm).await, 5);
}

#[tokio::test]
async fn a_pool_goes_with_its_own_resource_only() {
    let (farm, lead) = leading().await;
    mirror_pool(&farm, &lead, at(1), slots(2)).await;
    assert!(!mirror::pool_gone(&farm.operator, lead.generation, "two", "ci/x86").await.unwrap());
    let sentence = refusal(people::remove_pool(&farm.operator, "ci/x86").await);
    assert!(sentence.contains("kept by the BuilderPool x86 in namespace ci"), "{sentence}");
    assert!(mirror::pool_gone(&farm.operator, lead.generation, "one", "ci/x86").await.unwrap());
    assert_eq!(mirror::pool_counts(&farm.operator).await.unwrap(), []);
}

#[tokio::test]
async fn a_pool_that_went_with_its_resource_does_not_come_back() {
    let (farm, lead) = leading().await;
    mirror_pool(&farm, &lead, at(1), slots(2)).await;
    mirror::pool_gone(&farm.operator, lead.generation, "one", "ci/x86").await.unwrap();
    assert!(!mirror_pool(&farm, &lead, at(1), slots(2)).await);
    assert!(mirror_pool(&farm, &lead, Resource { uid: "two", generation: 1 }, slots(2)).await);
}

#[tokio::test]
async fn a_pool_is_counted_with_what_it_does_and_could_do() {
    let (farm, pool, node) = Farm::small(4).await;
    farm.project("other").await;
    let idle = farm.node(&pool, "idle").await;
    farm.pool("empty", &["aarch64-linux"], 1).await;
    let graph: &[(&str, &[&str])] = &[("a", &[]), ("b", &[]), ("c", &[]), ("d", &[]), ("later", &["a"])];
    farm.queue("main", graph).await;
    farm.queue("other", &[("c", &[]), ("d", &[])]).await;
    let claims = node.claim(2).await.unwrap();
    node.start_upload(&[claims[0].fence]).await.unwrap();
    people::drain(&farm.operator, farm.node_of(&idle).await, "cordoned", None).await.unwrap();
    let counts = mirror::pool_counts(&farm.operator).await.unwrap();
    let none = PoolCounts {
        name: "empty".to_owned(),
        uid: None,
        nodes: 0,
        busy: 0,
        draining: 0,
        building: 0,
        uploading: 0,
        queued: 0,
    };
    let some = PoolCounts {
        name: "pool".to_owned(),
        uid: None,
        nodes: 2,
        busy: 1,
        draining: 1,
        building: 1,
        uploading: 1,
        queued: 2,
    };
    assert_eq!(counts, [none, some]);
}

#[tokio::test]
async fn what_waits_counts_for_a_pool_without_a_node() {
    let farm = Farm::new().await;
    farm.pool("pool", &[SYSTEM], 1).await;
    farm.project("main").await;
    farm.project("paused").await;
    farm.queue("main", &[("a", &[])]).await;
    farm.queue("paused", &[("b", &[])]).await;
    farm.put_project(Project { paused: true, ..Project::new("paused") }).await;
    assert_eq!(mirror::pool_counts(&farm.operator).await.unwrap()[0].queued, 1);
}

#[tokio::test]
async fn a_pools_memory_is_what_its_resource_says() {
    let (farm, lead) = leading().await;
    for memory in [4 << 30, 16 << 30] {
        mirror_pool(&farm, &lead, at(memory), Pool { memory, ..slots(1) }).await;
        assert_eq!(farm.value::<i64>("SELECT memory FROM ci.pool WHERE id > $1", 0).await, memory);
    }
}

/// What waits: how many builds for which pools, with the features of each that they do not ask for.
async fn demand(farm: &Farm) -> Vec<(i64, Vec<(String, i32)>)> {
    let demand = mirror::demand(&farm.operator).await.unwrap();
    demand.into_iter().map(|demand| (demand.jobs, demand.pools)).collect()
}

#[tokio::test]
async fn what_waits_is_told_by_the_pools_that_could_take_it() {
    let farm = Farm::new().await;
    farm.project("main").await;
    let plain = Pool { features: Some(Vec::new()), ..slots(1) };
    farm.put_pool(Pool { name: "plain", ..plain.clone() }).await;
    let kvm = || vec!["kvm".to_owned()];
    farm.put_pool(Pool { name: "kvm", features: Some(kvm()), ..plain.clone() }).await;
    farm.put_pool(Pool { name: "kept", mandatory_features: kvm(), ..plain }).await;
    let mut needs_kvm = derivation("needs-kvm", &[]);
    needs_kvm.features = kvm();
    farm.evaluate_nodes(
        "main",
        vec![derivation("a", &[]), derivation("b", &["a"]), derivation("c", &[]), needs_kvm],
    )
    .await;
    farm.settle().await;
    let pool = |name: &str, surplus| (name.to_owned(), surplus);
    assert_eq!(
        demand(&farm).await,
        [(1, vec![pool("kept", 0), pool("kvm", 0)]), (2, vec![pool("kvm", 1), pool("plain", 0)])]
    );
}

#[tokio::test]
async fn what_a_projects_limit_holds_back_does_not_wait_for_a_pool() {
    let (farm, _, node) = Farm::small(4).await;
    farm.put_project(Project { max_concurrent: Some(3), ..Project::new("main") }).await;
    farm.queue("main", &[("a", &[]), ("b", &[]), ("c", &[]), ("d", &[]), ("e", &[])]).await;
    let waiting = async || demand(&farm).await.iter().map(|(jobs, _)| *jobs).sum::<i64>();
    assert_eq!(waiting().await, 3);
    farm.claim(&node).await;
    assert_eq!(waiting().await, 2);
    farm.project("other").await;
    farm.queue("other", &[("d", &[])]).await;
    assert_eq!(waiting().await, 3, "another project wants it too, and has no limit");
}

#[tokio::test]
async fn what_a_pool_lacks_is_noted_by_its_own_resource_only() {
    let (farm, lead) = leading().await;
    mirror_pool(&farm, &lead, at(1), slots(1)).await;
    let bounds = mirror::Bounds { at_maximum: true, note: Some("0/2 nodes are available".to_owned()) };
    let note =
        async |uid| mirror::note_pool(&farm.operator, lead.generation, uid, "ci/x86", &bounds).await.unwrap();
    assert!(!note("two").await);
    assert!(note("one").await);
    let full: bool = farm.value("SELECT at_maximum FROM ci.pool WHERE id > $1", 0).await;
    assert!(full);
    mirror_pool(&farm, &lead, at(2), slots(2)).await;
    let full: bool = farm.value("SELECT at_maximum FROM ci.pool WHERE id > $1", 0).await;
    assert!(full, "a change of the resource says nothing about it");
}

#[tokio::test]
async fn a_project_is_counted_with_its_newest_evaluation() {
    let (farm, _, node) = Farm::small(1).await;
    let lead = farm.operate().await;
    mirror(&farm, &lead, at(1), Project::new(NAME)).await;
    let before = mirror::project_counts(&farm.operator).await.unwrap();
    assert_eq!((before.len(), before[0].queued, before[0].last.clone()), (1, 0, None));
    let evaluation = farm.queue(NAME, &[("a", &[]), ("b", &[])]).await.id;
    farm.claim(&node).await;
    let after = mirror::project_counts(&farm.operator).await.unwrap().remove(0);
    assert_eq!((after.name.as_str(), after.queued, after.running), (NAME, 1, 1));
    assert_eq!(after.last.unwrap().id, evaluation);
}
