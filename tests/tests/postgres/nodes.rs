//! The builders, as people see them.

use harmonia_queue::{Error, nodes, people};
use harmonia_tests::farm::{Farm, SYSTEM};

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
