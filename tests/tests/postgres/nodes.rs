//! The builders, as people see them.

use harmonia_queue::builder::{Node, Session};
use harmonia_queue::people::Pool;
use harmonia_queue::{Error, janitor, nodes, people, signer};
use harmonia_tests::farm::{Farm, SYSTEM};

const DAY: f64 = 86_400.0;

async fn count(farm: &Farm, table: &str) -> i64 {
    let count = format!("SELECT count(*) FROM ci.{table}");
    sqlx::query_scalar(sqlx::AssertSqlSafe(count)).fetch_one(&farm.database.admin()).await.unwrap()
}

#[tokio::test]
async fn a_node_is_shown_with_what_it_does() {
    let (farm, _pool, node) = Farm::small(4).await;
    farm.queue("main", &[("a", &[]), ("b", &[])]).await;
    let claims = node.claim(2).await.unwrap();
    node.start_upload(&[claims[0].fence]).await.unwrap();
    let shown = &nodes::list(&farm.frontend).await.unwrap()[0];
    assert_eq!((shown.name.as_str(), shown.pool.as_str(), shown.state()), ("node", "pool", "active"));
    assert_eq!((shown.slots, shown.building, shown.uploading), (4, 1, 1));
}

#[tokio::test]
async fn a_drain_goes_from_draining_to_drained_to_gone() {
    let (farm, _pool, node) = Farm::small(1).await;
    farm.queue("main", &[("a", &[])]).await;
    let claim = farm.claim(&node).await;
    let state = async || nodes::list(&farm.frontend).await.unwrap()[0].state();
    people::drain(&farm.operator, farm.node_of(&node).await, "cordoned", None).await.unwrap();
    assert_eq!(state().await, "draining");
    farm.succeed(&node, &claim).await;
    assert_eq!(state().await, "drained");
    node.deregister().await.unwrap();
    assert_eq!(state().await, "gone");
}

#[tokio::test]
async fn a_node_is_found_by_its_name_unless_two_have_it() {
    let (farm, _pool, node) = Farm::small(1).await;
    assert_eq!(nodes::named(&farm.frontend, "node").await.unwrap(), farm.node_of(&node).await);
    let unknown = nodes::named(&farm.frontend, "nobody").await.unwrap_err();
    assert!(matches!(unknown, Error::NotFound(_)), "{unknown}");
    let other = farm.pool("other", &[SYSTEM], 1).await;
    farm.node(&other, "node").await;
    let twice = nodes::named(&farm.frontend, "node").await.unwrap_err();
    assert!(twice.to_string().contains("2 pools"), "{twice}");
}

#[tokio::test]
async fn a_pool_has_a_hundred_kinds_of_nodes_and_forgets_those_that_went() {
    let farm = Farm::new().await;
    farm.freeze().await;
    let features: Vec<String> = (0..7).map(|n| format!("f{n}")).collect();
    let pool = Pool {
        name: "pool",
        login: "",
        systems: vec![SYSTEM.to_owned()],
        features: Some(features.clone()),
        mandatory_features: Vec::new(),
        slots: 1,
        memory: 0,
    };
    let pool = farm.put_pool(pool).await;
    let register = async |kind: usize| {
        let some = features.iter().enumerate().filter(|(n, _)| kind >> n & 1 == 1).map(|(_, f)| f.clone());
        let node = Node { features: Some(some.collect()), ..Node::new("node", "the secret of a node", 1) };
        Session::register(&pool.db, &node).await
    };
    for kind in 0..100 {
        register(kind).await.unwrap();
    }
    let refused = register(100).await.unwrap_err();
    assert!(matches!(&refused, Error::Invalid(words) if words.contains("100 kinds")), "{refused:?}");
    register(99).await.unwrap();
    farm.advance(1.1 * DAY).await;
    let lead = farm.lead().await;
    janitor::prune(&farm.operator, lead.generation).await.unwrap();
    assert_eq!(count(&farm, "profile").await, 1);
    register(100).await.unwrap();
}

#[tokio::test]
async fn nodes_that_left_nothing_behind_are_forgotten() {
    let (farm, pool, node) = Farm::small(1).await;
    farm.queue("main", &[("a", &[])]).await;
    farm.build_all(&node).await;
    for name in ["idle", "drained"] {
        farm.node(&pool, name).await.deregister().await.unwrap();
    }
    let drained = nodes::named(&farm.frontend, "drained").await.unwrap();
    people::drain(&farm.operator, drained, "broken", None).await.unwrap();
    node.deregister().await.unwrap();
    farm.advance(2.0 * DAY).await;
    let lead = farm.lead().await;
    let prune = async || janitor::prune(&farm.operator, lead.generation).await.unwrap();
    prune().await;
    assert_eq!(count(&farm, "node").await, 2);
    assert!(nodes::named(&farm.frontend, "idle").await.is_err());
    // Of its attempts nothing is left by now; of what it built there is.
    farm.database.execute("DELETE FROM ci.attempt").await;
    for nodes in [2, 1] {
        farm.advance(2.0 * DAY).await;
        prune().await;
        assert_eq!(count(&farm, "node").await, nodes);
        let ids = signer::nodes_named(&farm.signer, "node").await.unwrap();
        if let [id] = ids[..] {
            assert_eq!(signer::forget(&farm.signer, &[], Some(id)).await.unwrap().len(), 1);
        }
    }
    assert_eq!((count(&farm, "profile").await, count(&farm, "session").await), (0, 0));
}
