//! What runs out of memory, alone on its node, goes on where there is more.

use harmonia_queue::builder::{Failure, Session};
use harmonia_queue::people::{self, Pool, Project};
use harmonia_queue::{janitor, mirror};
use harmonia_tests::farm::{Farm, PoolHandle, SYSTEM};

const GIB: i64 = 1 << 30;

async fn pool(farm: &Farm, name: &str, memory: i64) -> PoolHandle {
    let pool = Pool {
        name,
        login: "",
        systems: vec![SYSTEM.to_owned()],
        features: None,
        mandatory_features: Vec::new(),
        slots: 1,
        memory,
    };
    farm.put_pool(pool).await
}

/// A build has just run out of memory on the node of a pool.
struct Scene {
    farm: Farm,
    small: Session,
    job: i64,
}

impl Scene {
    /// A pool of so much memory, and others without nodes.
    async fn new(memory: i64, others: &[(&str, i64)]) -> Scene {
        let farm = Farm::new().await;
        farm.freeze().await;
        farm.project("main").await;
        let small = pool(&farm, "small", memory).await;
        for (name, memory) in others {
            pool(&farm, name, *memory).await;
        }
        let small = farm.node(&small, "small").await;
        let job = farm.queue("main", &[("greedy", &[])]).await["greedy"];
        let scene = Scene { farm, small, job };
        scene.fail(&scene.small).await;
        scene
    }

    /// The node has it, runs out of memory, and the time of the next try has come.
    async fn fail(&self, node: &Session) {
        let claim = self.farm.claim(node).await;
        assert!(node.fail(claim.fence, Failure::Oom, "killed").await.unwrap());
        self.farm.pass(300.0).await;
        node.heartbeat(&[], None).await.unwrap();
    }

    async fn node(&self, name: &str, memory: i64) -> Session {
        let node = self.farm.node(&pool(&self.farm, name, memory).await, name).await;
        self.farm.settle().await;
        node
    }

    async fn is_offered(&self, node: &Session) -> bool {
        let claims = node.claim(1).await.unwrap();
        !claims.is_empty() && claims[0].fence.job == self.job
    }

    async fn error(&self) -> String {
        self.farm.value("SELECT error FROM ci.job WHERE id = $1", self.job).await
    }

    async fn explained(&self, code: &str) -> Option<String> {
        let reasons = people::why(&self.farm.frontend, self.job).await.unwrap();
        reasons.into_iter().find_map(|(reason, sentence)| (reason == code).then_some(sentence))
    }

    /// How many builds wait for which pools, with what those have too much.
    async fn demand(&self) -> Vec<(i64, Vec<(String, i32)>)> {
        let demand = mirror::demand(&self.farm.operator).await.unwrap();
        demand.into_iter().map(|demand| (demand.jobs, demand.pools)).collect()
    }
}

#[tokio::test]
async fn what_outgrew_a_pool_is_claimed_only_where_there_is_more() {
    let scene = Scene::new(4 * GIB, &[("large", 16 * GIB)]).await;
    let (equal, large) = (scene.node("equal", 4 * GIB).await, scene.node("large", 16 * GIB).await);
    assert!(!scene.is_offered(&scene.small).await);
    assert!(!scene.is_offered(&equal).await);
    let claim = scene.farm.claim(&large).await;
    scene.farm.succeed(&large, &claim).await;
    scene.farm.settle().await;
    assert_eq!(scene.farm.state(scene.job).await, "succeeded");
    scene.farm.assert_sound().await;
}

#[tokio::test]
async fn it_goes_on_from_pool_to_pool() {
    let scene = Scene::new(4 * GIB, &[("middle", 8 * GIB), ("large", 16 * GIB)]).await;
    let middle = scene.node("middle", 8 * GIB).await;
    scene.fail(&middle).await;
    assert!(!scene.is_offered(&middle).await);
    let large = scene.node("large", 16 * GIB).await;
    assert!(scene.is_offered(&large).await);
    scene.farm.assert_sound().await;
}

#[tokio::test]
async fn it_waits_for_a_node_of_a_larger_pool_that_has_none() {
    let scene = Scene::new(4 * GIB, &[("large", 16 * GIB)]).await;
    assert!(!scene.is_offered(&scene.small).await);
    assert_eq!(scene.demand().await, [(1, vec![("large".to_owned(), 3)])]);
    let sentence = "It ran out of memory where there are 4 GiB: only a pool with more may take it.";
    assert_eq!(scene.explained("memory").await.as_deref(), Some(sentence));
    assert_eq!(scene.farm.why(scene.job).await, ["memory", "no_node", "order"]);
}

#[tokio::test]
async fn while_it_waits_for_its_next_try_it_says_where_that_will_be() {
    let scene = Scene::new(4 * GIB, &[("large", 16 * GIB)]).await;
    assert_eq!(scene.error().await, "killed; 4 GiB of memory are too little, a pool with more comes next");
}

#[tokio::test]
async fn without_a_larger_pool_it_is_tried_again_and_says_in_the_end_that_there_is_none() {
    let scene = Scene::new(GIB / 2, &[("equal", GIB / 2)]).await;
    scene.fail(&scene.small).await;
    let second = scene.node("equal", GIB / 2).await;
    scene.fail(&second).await;
    scene.fail(&scene.small).await;
    assert_eq!(scene.farm.state(scene.job).await, "failed");
    let sentence = "killed; 512 MiB of memory are too little, and no pool that could build it has more";
    assert_eq!(scene.error().await, sentence);
}

#[tokio::test]
async fn a_pool_of_which_nobody_said_how_much_it_has_is_never_outgrown() {
    let scene = Scene::new(0, &[("large", 16 * GIB)]).await;
    assert_eq!(scene.error().await, "killed");
    assert!(scene.is_offered(&scene.small).await);
}

#[tokio::test]
async fn a_larger_pool_that_its_project_may_not_use_does_not_count() {
    let scene = Scene::new(4 * GIB, &[("large", 16 * GIB)]).await;
    let large = scene.node("large", 16 * GIB).await;
    let only = Project { pools: Some(vec!["small".to_owned()]), ..Project::new("bound") };
    scene.farm.put_project(only).await;
    let job = scene.farm.queue("bound", &[("other", &[])]).await["other"];
    let claim = scene.farm.claim(&scene.small).await;
    scene.small.fail(claim.fence, Failure::Oom, "killed").await.unwrap();
    scene.farm.pass(31.0).await;
    let bound = Scene { job, ..scene };
    assert!(!bound.is_offered(&large).await, "it has the other one");
    assert!(
        bound.is_offered(&bound.small).await,
        "it neither waits for the larger pool nor avoids its only node"
    );
}

#[tokio::test]
async fn whoever_wants_it_later_gets_it_from_where_it_went() {
    let scene = Scene::new(4 * GIB, &[("large", 16 * GIB)]).await;
    scene.farm.project("later").await;
    scene.farm.put_project(Project { paused: true, ..Project::new("main") }).await;
    scene.farm.queue("later", &[("greedy", &[])]).await;
    let large = scene.node("large", 16 * GIB).await;
    assert!(!scene.is_offered(&scene.small).await);
    assert!(scene.is_offered(&large).await);
    scene.farm.assert_sound().await;
}

#[tokio::test]
async fn when_the_larger_pool_goes_it_says_so_and_a_rebuild_begins_where_it_began() {
    let scene = Scene::new(4 * GIB, &[("large", 16 * GIB)]).await;
    let lead = scene.farm.lead().await;
    people::remove_pool(&scene.farm.operator, "large").await.unwrap();
    scene.farm.advance(1801.0).await;
    janitor::fail_unsupported(&scene.farm.operator, lead.generation).await.unwrap();
    let sentence = "No pool or node for x86_64-linux has more than the 4 GiB of memory that it ran out of.";
    assert_eq!(scene.error().await, sentence);
    people::rebuild(&scene.farm.frontend, scene.job).await.unwrap();
    scene.farm.settle().await;
    assert!(scene.is_offered(&scene.small).await);
    scene.farm.assert_sound().await;
}

#[tokio::test]
async fn pods_for_what_fits_everywhere_are_started_in_the_smallest_pool() {
    let scene = Scene::new(4 * GIB, &[("large", 16 * GIB)]).await;
    scene.farm.queue("main", &[("modest", &[])]).await;
    let pools = |large, small| vec![("large".to_owned(), large), ("small".to_owned(), small)];
    assert_eq!(scene.demand().await, [(1, vec![("large".to_owned(), 3)]), (1, pools(4, 3))]);
}
