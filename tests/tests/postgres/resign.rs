//! Signing everything again: one signer at a time, with the keys that were asked for, from where the last one stopped.

use harmonia_queue::Error;
use harmonia_queue::resign::{self, Resign};
use harmonia_tests::farm::Farm;

fn keys(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Somebody asked for keys `a` and `b`.
async fn asked() -> Farm {
    let farm = Farm::new().await;
    farm.freeze().await;
    resign::ask(&farm.signer, &keys(&["b", "a"])).await.unwrap();
    farm
}

#[tokio::test]
async fn who_was_not_asked_signs_nothing() {
    let farm = Farm::new().await;
    assert!(Resign::begin(&farm.signer, "one", &keys(&["a"])).await.unwrap().is_none());
    assert_eq!(resign::state(&farm.signer).await.unwrap().asked_at, None);
}

#[tokio::test]
async fn a_signer_with_other_keys_leaves_it_alone() {
    let farm = asked().await;
    for other in [&["a"][..], &["a", "c"], &["a", "b", "c"]] {
        assert!(Resign::begin(&farm.signer, "one", &keys(other)).await.unwrap().is_none(), "{other:?}");
    }
    assert!(Resign::begin(&farm.signer, "one", &keys(&["a", "b"])).await.unwrap().is_some());
}

#[tokio::test]
async fn one_does_it_at_a_time_and_the_next_goes_on_where_it_was() {
    let farm = asked().await;
    let mut first = Resign::begin(&farm.signer, "one", &keys(&["a", "b"])).await.unwrap().unwrap();
    first.advance("/nix/store/m".to_owned(), 7).await.unwrap();
    assert!(Resign::begin(&farm.signer, "two", &keys(&["a", "b"])).await.unwrap().is_none());
    farm.advance(121.0).await;
    let second = Resign::begin(&farm.signer, "two", &keys(&["a", "b"])).await.unwrap().unwrap();
    assert_eq!(second.after, "/nix/store/m");
    let refused = first.advance("/nix/store/z".to_owned(), 1).await.unwrap_err();
    assert!(matches!(refused, Error::NotLeader(_)), "{refused:?}");
    second.end().await.unwrap();
    let state = resign::state(&farm.signer).await.unwrap();
    assert_eq!((state.done, state.running, state.ended_at.is_some()), (7, false, true));
    assert!(Resign::begin(&farm.signer, "one", &keys(&["a", "b"])).await.unwrap().is_none());
}

#[tokio::test]
async fn who_is_asked_again_begins_again() {
    let farm = asked().await;
    let mut first = Resign::begin(&farm.signer, "one", &keys(&["a", "b"])).await.unwrap().unwrap();
    first.advance("/nix/store/m".to_owned(), 7).await.unwrap();
    resign::ask(&farm.signer, &keys(&["a"])).await.unwrap();
    assert!(first.end().await.is_err());
    let second = Resign::begin(&farm.signer, "two", &keys(&["a"])).await.unwrap().unwrap();
    assert_eq!(second.after, "");
}
