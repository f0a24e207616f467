//! What a claim gives to whom.

use std::collections::{HashMap, HashSet};

use futures::future::join_all;
use harmonia_queue::Error;
use harmonia_queue::builder::{self, Input, Session};
use harmonia_queue::ingest::{self, KnownPath, Node};
use harmonia_queue::people::{self, Pool};
use harmonia_tests::farm::{Farm, PoolHandle, SYSTEM, derivation, drv_path, store_path};

async fn leaves(farm: &Farm, count: usize) {
    let leaf = |n| derivation(&format!("leaf{n}"), &[]);
    farm.evaluate_nodes("main", (0..count).map(leaf).collect()).await;
    farm.settle().await;
}

/// A pool of x86_64-linux with these features.
async fn featured(farm: &Farm, features: &[&str], mandatory: &[&str]) -> PoolHandle {
    let list = |items: &[&str]| items.iter().map(|&item| item.to_owned()).collect::<Vec<_>>();
    let systems = list(&[SYSTEM]);
    let pool = Pool {
        name: "featured",
        login: "",
        systems,
        features: Some(list(features)),
        mandatory_features: list(mandatory),
        slots: 4,
        memory: 0,
    };
    farm.put_pool(pool).await
}

fn requiring(name: &str, feature: &str) -> Node {
    Node { features: vec![feature.to_owned()], ..derivation(name, &[]) }
}

fn for_system(name: &str, system: &str) -> Node {
    Node { system: system.to_owned(), ..derivation(name, &[]) }
}

#[tokio::test]
async fn a_claim_never_exceeds_the_free_slots() {
    let (farm, _, node) = Farm::small(2).await;
    leaves(&farm, 5).await;
    assert_eq!(node.claim(5).await.unwrap().len(), 2);
    assert!(node.claim(5).await.unwrap().is_empty());
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_build_that_uploads_has_left_its_slot() {
    let (farm, _, node) = Farm::small(1).await;
    leaves(&farm, 2).await;
    let claim = farm.claim(&node).await;
    node.start_upload(&[claim.fence]).await.unwrap();
    assert_eq!(node.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn claims_stop_while_uploads_pile_up() {
    let (farm, _, node) = Farm::small(1).await;
    leaves(&farm, 5).await;
    for _ in 0..3 {
        let claim = farm.claim(&node).await;
        node.start_upload(&[claim.fence]).await.unwrap();
    }
    assert!(node.claim(1).await.unwrap().is_empty());
}

#[tokio::test]
async fn simultaneous_claimers_get_different_jobs() {
    let (farm, pool, _) = Farm::small(4).await;
    leaves(&farm, 40).await;
    let nodes = join_all((0..8).map(|n| {
        let (farm, pool) = (&farm, &pool);
        async move { farm.node(pool, &format!("node{n}")).await }
    }))
    .await;
    farm.settle().await;
    let claims = join_all(nodes.iter().map(|node| node.claim(4))).await;
    let jobs: Vec<i64> = claims.into_iter().flatten().flatten().map(|claim| claim.fence.job).collect();
    assert!(!jobs.is_empty());
    assert_eq!(jobs.iter().collect::<HashSet<_>>().len(), jobs.len());
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_claim_brings_the_text_the_inputs_and_what_they_must_be() {
    let (farm, _, node) = Farm::small(1).await;
    let libc = store_path("libc", "libc");
    let known =
        KnownPath { path: libc.clone(), nar_hash: vec![7; 32], nar_size: 1, references: vec![libc.clone()] };
    ingest::record_paths(&farm.evaluator, &[known]).await.unwrap();
    let input = Node { cached: true, aterm: None, ..derivation("libc", &[]) };
    farm.evaluate_nodes("main", vec![input, derivation("top", &["libc"])]).await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    assert_eq!(claim.aterm, b"Derive(top)");
    let input = Input {
        drv_path: drv_path("libc"),
        output: "out".into(),
        path: Some(libc),
        nar_hash: Some(vec![7; 32]),
    };
    assert_eq!(claim.inputs, [input]);
}

#[tokio::test]
async fn the_closure_of_the_inputs_follows_their_references() {
    let (farm, _, node) = Farm::small(1).await;
    let [near, far] = ["near", "far"].map(|name| store_path(name, name));
    let known = [(&near, vec![far.clone()]), (&far, Vec::new())].map(|(path, references)| KnownPath {
        path: path.clone(),
        nar_hash: vec![1; 32],
        nar_size: 1,
        references,
    });
    ingest::record_paths(&farm.evaluator, &known).await.unwrap();
    let input = Node { cached: true, aterm: None, ..derivation("near", &[]) };
    farm.evaluate_nodes("main", vec![input, derivation("top", &["near"])]).await;
    farm.settle().await;
    let inputs: Vec<String> =
        farm.claim(&node).await.inputs.into_iter().filter_map(|input| input.path).collect();
    let closure = node.closure(&inputs).await.unwrap();
    let hash = Some(vec![1; 32]);
    assert_eq!(closure, HashMap::from([(near, hash.clone()), (far, hash)]));
}

#[tokio::test]
async fn a_node_claims_only_what_its_systems_build() {
    let (farm, _, node) = Farm::small(4).await;
    farm.evaluate_nodes("main", vec![for_system("arm", "aarch64-linux"), derivation("intel", &[])]).await;
    farm.settle().await;
    assert_eq!(farm.claim_names(&node, 4).await, ["intel"]);
}

#[tokio::test]
async fn builtin_fits_every_node() {
    let farm = Farm::new().await;
    farm.project("main").await;
    let pool = farm.pool("arm", &["aarch64-linux"], 1).await;
    let node = farm.node(&pool, "node").await;
    farm.evaluate_nodes("main", vec![for_system("fetch", "builtin")]).await;
    farm.settle().await;
    assert_eq!(farm.claim_names(&node, 1).await, ["fetch"]);
}

#[tokio::test]
async fn extra_platforms_come_by_themselves() {
    let (farm, _, node) = Farm::small(4).await;
    let nodes = vec![for_system("old", "i686-linux"), for_system("new", "x86_64-v3-linux")];
    farm.evaluate_nodes("main", nodes).await;
    farm.settle().await;
    assert_eq!(farm.claim_names(&node, 4).await, ["new", "old"]);
}

#[tokio::test]
async fn a_node_claims_only_what_its_features_allow() {
    let (farm, _, node) = Farm::small(4).await;
    farm.evaluate_nodes("main", vec![requiring("vm", "kvm"), requiring("big", "big-parallel")]).await;
    farm.settle().await;
    assert_eq!(farm.claim_names(&node, 4).await, ["big"]);
}

#[tokio::test]
async fn a_mandatory_feature_must_be_asked_for() {
    let (farm, ..) = Farm::small(4).await;
    let pool = featured(&farm, &["kvm"], &["kvm"]).await;
    let node = farm.node(&pool, "featured").await;
    farm.evaluate_nodes("main", vec![requiring("vm", "kvm"), derivation("plain", &[])]).await;
    farm.settle().await;
    assert_eq!(farm.claim_names(&node, 4).await, ["vm"]);
}

#[tokio::test]
async fn a_node_has_no_more_than_its_pool() {
    let (farm, pool, _) = Farm::small(2).await;
    let boast = builder::Node {
        systems: Some(vec![SYSTEM.into(), "aarch64-linux".into()]),
        features: Some(vec!["kvm".into(), "big-parallel".into()]),
        ..builder::Node::new("boaster", "the secret of a node", 100)
    };
    let node = Session::register(&pool.db, &boast).await.unwrap();
    assert_eq!(node.slots, 2);
    let nodes =
        vec![for_system("arm", "aarch64-linux"), requiring("vm", "kvm"), requiring("big", "big-parallel")];
    farm.evaluate_nodes("main", nodes).await;
    farm.settle().await;
    assert_eq!(farm.claim_names(&node, 4).await, ["big"]);
}

#[tokio::test]
async fn a_node_may_have_less_than_its_pool() {
    let (farm, pool, _) = Farm::small(4).await;
    let modest = builder::Node {
        features: Some(Vec::new()),
        ..builder::Node::new("modest", "the secret of a node", 1)
    };
    let node = Session::register(&pool.db, &modest).await.unwrap();
    assert_eq!(node.slots, 1);
    farm.evaluate_nodes("main", vec![requiring("big", "big-parallel"), derivation("plain", &[])]).await;
    farm.settle().await;
    assert_eq!(farm.claim_names(&node, 4).await, ["plain"]);
}

#[tokio::test]
async fn nobody_registers_in_a_pool_that_was_removed() {
    let (farm, pool, _) = Farm::small(1).await;
    assert!(people::remove_pool(&farm.operator, "pool").await.unwrap());
    let node = builder::Node::new("late", "the secret of a node", 1);
    let refused = Session::register(&pool.db, &node).await.unwrap_err();
    assert!(matches!(&refused, Error::Forbidden(_)), "{refused:?}");
}

#[tokio::test]
async fn a_new_kind_of_node_finds_what_waits() {
    let (farm, ..) = Farm::small(1).await;
    farm.evaluate_nodes("main", vec![requiring("vm", "kvm")]).await;
    let pool = featured(&farm, &["kvm"], &[]).await;
    farm.settle().await;
    let node = farm.node(&pool, "featured").await;
    farm.settle().await;
    assert_eq!(farm.claim_names(&node, 1).await, ["vm"]);
}

/// A job for the node's pool, and an older one of the same project for machines that are not there.
async fn half_of_a_project(farm: &Farm) {
    farm.evaluate_nodes("main", vec![for_system("foreign", "aarch64-linux")]).await;
    farm.evaluate_nodes("main", vec![derivation("own", &[])]).await;
    farm.settle().await;
}

#[tokio::test]
async fn of_a_project_with_several_systems_a_node_gets_what_it_can_build() {
    let (farm, _, node) = Farm::small(4).await;
    half_of_a_project(&farm).await;
    assert_eq!(farm.claim_names(&node, 4).await, ["own"]);
}

/// Evaluations one after the other, in which classes alternate.
async fn alternating(farm: &Farm) {
    for (name, system) in [("first", "builtin"), ("second", SYSTEM), ("third", "builtin"), ("fourth", SYSTEM)]
    {
        farm.evaluate_nodes("main", vec![for_system(name, system)]).await;
    }
    farm.settle().await;
}

#[tokio::test]
async fn several_classes_are_claimed_in_one_order() {
    let (farm, _, node) = Farm::small(4).await;
    alternating(&farm).await;
    assert_eq!(farm.claim_names(&node, 3).await, ["first", "second", "third"]);
}

#[tokio::test]
async fn several_classes_of_a_project_that_has_others_too_are_claimed_in_one_order() {
    let (farm, _, node) = Farm::small(4).await;
    half_of_a_project(&farm).await;
    alternating(&farm).await;
    assert_eq!(farm.claim_names(&node, 4).await, ["first", "own", "second", "third"]);
}

#[tokio::test]
async fn an_offer_in_a_lane_that_is_newer_than_the_profile_is_passed_by() {
    let (farm, _, node) = Farm::small(4).await;
    half_of_a_project(&farm).await;
    farm.database.execute("UPDATE ci.profile SET whole = '{t}'").await;
    assert_eq!(farm.claim_names(&node, 4).await, ["own"]);
}
