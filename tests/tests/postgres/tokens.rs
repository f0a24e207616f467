//! Secrets that people and evaluators show.

use std::time::Duration;

use harmonia_queue::people::{self, Scope, Who, create_token, revoke_token, token_scope};
use harmonia_queue::signer::{accept_sources, check_evaluation};
use harmonia_queue::{Db, Error, pages};
use harmonia_tests::farm::{Farm, output, store_path};

#[tokio::test]
async fn a_secret_allows_what_its_token_says() {
    let farm = Farm::new().await;
    let secret = create_token(&farm.frontend, "laptop", Scope::Operate, None).await.unwrap();
    let found = token_scope(&farm.frontend, &secret).await.unwrap();
    assert_eq!(found, Some(("laptop".to_owned(), Scope::Operate)));
}

#[tokio::test]
async fn any_other_secret_allows_nothing() {
    let farm = Farm::new().await;
    create_token(&farm.frontend, "laptop", Scope::Admin, None).await.unwrap();
    assert_eq!(token_scope(&farm.frontend, "guess").await.unwrap(), None);
}

#[tokio::test]
async fn a_revoked_token_allows_nothing() {
    let farm = Farm::new().await;
    let secret = create_token(&farm.frontend, "laptop", Scope::Read, None).await.unwrap();
    revoke_token(&farm.frontend, "laptop").await.unwrap();
    assert_eq!(token_scope(&farm.frontend, &secret).await.unwrap(), None);
}

#[tokio::test]
async fn a_token_ends_with_its_time() {
    let farm = Farm::new().await;
    farm.freeze().await;
    let hour = Duration::from_secs(3600);
    let secret = create_token(&farm.frontend, "laptop", Scope::Read, Some(hour)).await.unwrap();
    assert!(token_scope(&farm.frontend, &secret).await.unwrap().is_some());
    farm.advance(3600.0).await;
    assert_eq!(token_scope(&farm.frontend, &secret).await.unwrap(), None);
}

#[tokio::test]
async fn a_name_is_taken_once() {
    let farm = Farm::new().await;
    create_token(&farm.frontend, "laptop", Scope::Read, None).await.unwrap();
    let again = create_token(&farm.frontend, "laptop", Scope::Admin, None).await;
    assert!(matches!(again, Err(Error::WrongState(sentence)) if sentence.contains("laptop")));
}

#[tokio::test]
async fn the_name_of_a_token_that_has_expired_is_free() {
    let farm = Farm::new().await;
    farm.freeze().await;
    let hour = Duration::from_secs(3600);
    for _ in 0..2 {
        create_token(&farm.frontend, "laptop", Scope::Read, Some(hour)).await.unwrap();
        farm.advance(3600.0).await;
    }
}

#[tokio::test]
async fn an_unknown_token_cannot_be_revoked() {
    let farm = Farm::new().await;
    assert!(matches!(revoke_token(&farm.frontend, "nobody").await, Err(Error::NotFound(_))));
}

#[tokio::test]
async fn the_secret_itself_is_not_kept() {
    let farm = Farm::new().await;
    let secret = create_token(&farm.frontend, "laptop", Scope::Read, None).await.unwrap();
    let rows: i64 = farm.value("SELECT count(*) FROM ci.token t WHERE $1 = 0", 0).await;
    assert_eq!(rows, 1);
    let kept: Vec<u8> = farm.value("SELECT secret_hash FROM ci.token WHERE $1 = 0", 0).await;
    assert_ne!(kept, secret.into_bytes());
}

#[tokio::test]
async fn a_cookie_ends_with_its_token() {
    let farm = Farm::new().await;
    farm.freeze().await;
    let minute = Some(Duration::from_secs(60));
    let secret = create_token(&farm.frontend, "laptop", Scope::Operate, minute).await.unwrap();
    let (id, name, scope) = pages::token_of(&farm.frontend, &secret).await.unwrap().unwrap();
    assert_eq!((name.as_str(), scope), ("laptop", Scope::Operate));
    assert_eq!(pages::token_now(&farm.frontend, id).await.unwrap(), Some(Scope::Operate));
    farm.advance(61.0).await;
    assert_eq!(pages::token_now(&farm.frontend, id).await.unwrap(), None);
    assert_eq!(pages::token_of(&farm.frontend, &secret).await.unwrap(), None);
}

#[tokio::test]
async fn an_invitation_is_taken_once_and_in_time() {
    let farm = Farm::new().await;
    farm.freeze().await;
    let admin = Db::from_pool(farm.database.admin());
    let invite = async || pages::invite(&admin, Scope::Admin, Duration::from_secs(60)).await.unwrap();
    let (taken, late) = (invite().await, invite().await);
    assert_eq!(pages::accept_invitation(&farm.frontend, &taken).await.unwrap(), Some(Scope::Admin));
    assert_eq!(pages::accept_invitation(&farm.frontend, &taken).await.unwrap(), None);
    farm.advance(61.0).await;
    assert_eq!(pages::accept_invitation(&farm.frontend, &late).await.unwrap(), None);
}

#[tokio::test]
async fn frontends_share_a_key_and_invite_nobody() {
    let farm = Farm::new().await;
    assert_eq!(pages::key(&farm.frontend).await.unwrap(), pages::key(&farm.frontend).await.unwrap());
    assert!(pages::key(&farm.signer).await.is_err());
    assert!(pages::invite(&farm.frontend, Scope::Admin, Duration::from_secs(60)).await.is_err());
}

// ---------------------------------------------------------------------------------------------- of evaluations

async fn an_evaluation(farm: &Farm) -> harmonia_queue::ingest::Ingest {
    farm.project("main").await;
    farm.begin("main").await
}

#[tokio::test]
async fn an_evaluation_has_one_secret_the_last() {
    let farm = Farm::new().await;
    let evaluation = an_evaluation(&farm).await;
    let first = evaluation.token().await.unwrap();
    let last = evaluation.token().await.unwrap();
    let id = evaluation.evaluation;
    let answers =
        [check_evaluation(&farm.signer, id, &first).await, check_evaluation(&farm.signer, id, &last).await];
    assert_eq!(answers.map(Result::unwrap), [false, true]);
}

#[tokio::test]
async fn an_evaluation_without_a_secret_is_nobodys() {
    let farm = Farm::new().await;
    let evaluation = an_evaluation(&farm).await;
    assert!(!check_evaluation(&farm.signer, evaluation.evaluation, "").await.unwrap());
}

#[tokio::test]
async fn an_evaluation_that_is_written_brings_no_more_sources() {
    let farm = Farm::new().await;
    let evaluation = an_evaluation(&farm).await;
    let (id, secret) = (evaluation.evaluation, evaluation.token().await.unwrap());
    evaluation.complete(&[]).await.unwrap();
    assert!(!check_evaluation(&farm.signer, id, &secret).await.unwrap());
    let source = output("", &store_path("source", "source"));
    assert!(accept_sources(&farm.signer, id, &secret, &[source]).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_source_known_from_elsewhere_is_in_the_bucket_from_now_on() {
    let farm = Farm::new().await;
    let evaluation = an_evaluation(&farm).await;
    let secret = evaluation.token().await.unwrap();
    let source = output("", &store_path("source", "source"));
    let known = harmonia_queue::ingest::KnownPath {
        path: source.path.clone(),
        nar_hash: source.nar_hash.clone(),
        nar_size: source.nar_size,
        references: Vec::new(),
    };
    harmonia_queue::ingest::record_paths(&farm.evaluator, &[known]).await.unwrap();
    let accepted =
        accept_sources(&farm.signer, evaluation.evaluation, &secret, std::slice::from_ref(&source))
            .await
            .unwrap();
    assert_eq!(accepted[0].file_hash, source.file_hash);
}

#[tokio::test]
async fn a_source_is_never_another() {
    let farm = Farm::new().await;
    let evaluation = an_evaluation(&farm).await;
    let secret = evaluation.token().await.unwrap();
    let source = output("", &store_path("source", "source"));
    accept_sources(&farm.signer, evaluation.evaluation, &secret, std::slice::from_ref(&source))
        .await
        .unwrap();
    let mut other = source.clone();
    other.nar_hash = vec![9; 32];
    let accepted = accept_sources(&farm.signer, evaluation.evaluation, &secret, &[other]).await.unwrap();
    assert_eq!(accepted[0].nar_hash, source.nar_hash);
}

#[tokio::test]
async fn nobody_revokes_anothers_token() {
    let farm = Farm::new().await;
    let (ann, eve) =
        (Who { instance: "https://h", login: "ann" }, Who { instance: "https://h", login: "eve" });
    let secret =
        people::create_member_token(&farm.frontend, "ann's", ann, Duration::from_secs(60)).await.unwrap();
    assert!(!people::revoke_member_token(&farm.frontend, "ann's", eve).await.unwrap());
    let owner = people::token_member(&farm.frontend, &secret).await.unwrap();
    assert_eq!(owner, Some(("https://h".to_owned(), "ann".to_owned())));
    assert!(people::revoke_member_token(&farm.frontend, "ann's", ann).await.unwrap());
    assert_eq!(people::token_member(&farm.frontend, &secret).await.unwrap(), None);
}
