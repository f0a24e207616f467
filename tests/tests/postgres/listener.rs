//! Wake-ups: they arrive, they are few, and whoever misses them polls.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{FutureExt, StreamExt, stream};
use harmonia_queue::builder::Failure;
use harmonia_queue::listen::{Address, Channel, Listener, Wake, notify};
use harmonia_queue::people;
use harmonia_queue::resolver::Resolver;
use harmonia_tests::farm::{Farm, SYSTEM, derivation};
use harmonia_tests::pg::{Options, Server};
use harmonia_tests::proxy::Fault;

use super::dropped::proxied;

/// So long that a test that waits for it would be seen to hang.
pub const NEVER: Duration = Duration::from_secs(3600);
const OFTEN: Duration = Duration::from_millis(50);
const ALL: [Channel; 3] = [Channel::Ready, Channel::Ended, Channel::Stop];

/// A machine that stalls is late with the hint by which a listener sees that it hears: then it tries again.
pub async fn listen(url: &str, channels: &[Channel], poll: Duration) -> Listener {
    for _ in 0..10 {
        let listener = Listener::connect(url.to_owned(), channels, poll).await;
        match &listener.trouble {
            None => return listener,
            Some(trouble) => eprintln!("{trouble}"),
        }
    }
    panic!("it never listens");
}

#[tokio::test]
async fn a_hint_arrives_on_its_channel() {
    let farm = Farm::new().await;
    let mut listener = listen(&farm.direct_url, &ALL, NEVER).await;
    for channel in ALL {
        notify(&farm.operator, channel, "3,4").await.unwrap();
        assert_eq!(listener.next().await, Wake::Hint(channel, "3,4".into()));
    }
}

#[tokio::test]
async fn builders_are_told_of_drains_and_of_their_ends() {
    let (farm, _, node) = Farm::small(1).await;
    let id = farm.node_of(&node).await;
    let mut listener = listen(&farm.direct_url, &[Channel::Stop], NEVER).await;
    for db in [&farm.operator, &farm.frontend] {
        people::drain(db, id, "cordoned", None).await.unwrap();
        assert_eq!(listener.next().await, Wake::Hint(Channel::Stop, String::new()));
        people::resume(db, id, "cordoned").await.unwrap();
        assert_eq!(listener.next().await, Wake::Hint(Channel::Stop, String::new()));
    }
}

#[tokio::test]
async fn a_listener_hears_only_what_it_listens_to() {
    let farm = Farm::new().await;
    let mut listener = listen(&farm.direct_url, &[Channel::Ended], NEVER).await;
    notify(&farm.operator, Channel::Ready, "").await.unwrap();
    notify(&farm.operator, Channel::Ended, "this").await.unwrap();
    assert_eq!(listener.next().await, Wake::Hint(Channel::Ended, "this".into()));
}

#[tokio::test]
async fn without_a_hint_it_polls() {
    let farm = Farm::new().await;
    let mut listener = listen(&farm.direct_url, &ALL, OFTEN).await;
    assert_eq!(listener.next().await, Wake::Poll);
    assert_eq!(listener.trouble, None);
}

#[tokio::test]
async fn a_listener_survives_a_crash_of_its_server_and_looks_when_it_is_back() {
    let server = Server::start(Options::default());
    let farm = Farm::on(server.database().await).await;
    let mut listener = listen(&farm.direct_url, &ALL, NEVER).await;
    server.stop_immediate().await;
    assert_eq!(listener.next().await, Wake::Poll);
    assert_eq!(listener.trouble.as_deref(), Some("the connection that listens was lost"));
    let (woken, ()) = tokio::join!(listener.next(), server.start_again());
    assert_eq!((woken, listener.trouble.as_deref()), (Wake::Poll, None));
    let admin = harmonia_queue::Db::direct(&farm.database.direct_url(), 1).unwrap();
    notify(&admin, Channel::Ready, "again").await.unwrap();
    assert_eq!(listener.next().await, Wake::Hint(Channel::Ready, "again".into()));
}

#[tokio::test]
async fn a_server_that_is_not_there_yet_is_waited_for_while_polling_goes_on() {
    let server = Server::start(Options::default());
    let farm = Farm::on(server.database().await).await;
    server.stop_immediate().await;
    let mut listener = Listener::connect(farm.direct_url.clone(), &ALL, OFTEN).await;
    assert_eq!(listener.next().await, Wake::Poll);
    assert!(listener.trouble.as_deref().is_some_and(|trouble| trouble.starts_with("cannot listen")));
    server.start_again().await;
    while listener.trouble.is_some() {
        assert_eq!(listener.next().await, Wake::Poll);
    }
}

#[tokio::test]
async fn a_connection_that_says_nothing_any_more_is_made_again() {
    let farm = Farm::new().await;
    let (proxy, url) = proxied(&farm).await;
    let mut listener = Listener::connect(url, &ALL, OFTEN).await;
    // As from a host that vanished, nothing comes back, not even an end.
    let (_silent, never) = Fault::hold();
    proxy.on_matching(1, |name| name == "SELECT 1", never);
    while listener.trouble.is_none() {
        assert_eq!(listener.next().await, Wake::Poll);
    }
    while listener.trouble.is_some() {
        assert_eq!(listener.next().await, Wake::Poll);
    }
}

#[derive(Debug, Clone)]
struct Changing(Arc<Mutex<String>>);

impl Address for Changing {
    fn url(&self) -> Option<String> {
        Some(self.0.lock().unwrap().clone())
    }
}

#[tokio::test]
async fn a_connection_is_made_again_with_the_new_password() {
    let farm = Farm::new().await;
    let login = farm.database.make_login("harmonia_frontend").await;
    let address = Changing(Arc::new(Mutex::new(login.direct_url.clone())));
    let mut listener = Listener::connect(address.clone(), &ALL, OFTEN).await;
    let role = &login.role;
    *address.0.lock().unwrap() = login.direct_url.replace(&login.password, "another");
    let ends = format!(
        "ALTER ROLE {role} PASSWORD 'another'; SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'"
    );
    farm.database.execute(&ends).await;
    while listener.trouble.is_none() {
        assert_eq!(listener.next().await, Wake::Poll);
    }
    while listener.trouble.is_some() {
        assert_eq!(listener.next().await, Wake::Poll);
    }
}

#[tokio::test]
async fn behind_a_transaction_pooler_it_polls_and_says_why() {
    let farm = Farm::new().await;
    let login = farm.database.make_login("harmonia_frontend").await;
    let url = farm.database.pooled_url_as(&login.role, &login.password);
    let mut listener = Listener::connect(url, &ALL, OFTEN).await;
    let trouble = listener.trouble.clone().expect("there are no hints");
    assert!(trouble.contains("through a pooler in transaction mode"), "{trouble}");
    assert!(trouble.contains("HARMONIA_CI_DATABASE_DIRECT_URL"), "{trouble}");
    for _ in 0..3 {
        assert_eq!(listener.next().await, Wake::Poll);
    }
}

#[tokio::test]
async fn listening_behind_a_pooler_does_not_break_into_calls_of_others() {
    let farm = Farm::new().await;
    let login = farm.database.make_login("harmonia_frontend").await;
    let url = farm.database.pooled_url_as(&login.role, &login.password);
    Listener::connect(url.clone(), &ALL, OFTEN).await;
    let db = harmonia_queue::Db::pooled(&url, 4).unwrap();
    for channel in ALL {
        notify(&db, channel, "").await.unwrap();
    }
}

/// Hints that come while `work` is done and the resolver runs, up to the first for which `last` holds.
async fn hints(
    farm: &Farm,
    listener: &mut Listener,
    work: impl Future<Output = ()>,
    last: impl AsyncFn(&Wake) -> bool,
) -> Vec<Wake> {
    let resolver = Resolver::default();
    let mut heard = Vec::new();
    let listening = async {
        work.await;
        resolver.nudge();
        loop {
            heard.push(listener.next().await);
            if last(&heard[heard.len() - 1]).await {
                return;
            }
        }
    };
    tokio::select! {
        () = resolver.run(&farm.operator) => unreachable!(),
        () = listening => {}
    }
    heard
}

async fn farm() -> Farm {
    let farm = Farm::new().await;
    farm.project("project").await;
    farm
}

#[tokio::test]
async fn builders_hear_which_classes_became_ready() {
    let farm = farm().await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    farm.node(&pool, "node").await;
    let mut listener = listen(&farm.direct_url, &[Channel::Ready], NEVER).await;
    let work = async { drop(farm.evaluate("project", &[("a", &[])]).await) };
    let heard = hints(&farm, &mut listener, work, async |_| true).await;
    let class: i32 =
        sqlx::query_scalar("SELECT class_id FROM ci.ready").fetch_one(&farm.database.admin()).await.unwrap();
    assert_eq!(heard, [Wake::Hint(Channel::Ready, class.to_string())]);
}

#[tokio::test]
async fn the_first_node_of_its_kind_hears_of_what_waits() {
    let farm = farm().await;
    let jobs = farm.evaluate("project", &[("a", &[])]).await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    farm.settle().await;
    let mut listener = listen(&farm.direct_url, &[Channel::Ready], NEVER).await;
    let node = farm.node(&pool, "node").await;
    let claimed = node.claim(1).await.unwrap();
    assert!(claimed.is_empty(), "its kind is not known yet: {claimed:?}");
    hints(&farm, &mut listener, async {}, async |_| true).await;
    assert_eq!(farm.claim(&node).await.fence.job, jobs["a"]);
}

#[tokio::test]
async fn frontends_hear_that_jobs_came_to_an_end() {
    let farm = farm().await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    let jobs = farm.evaluate("project", &[("a", &[]), ("above", &["a"])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    let mut listener = listen(&farm.direct_url, &[Channel::Ended], NEVER).await;
    let work = async { assert!(node.fail(claim.fence, Failure::BuildError, "").await.unwrap()) };
    let above_ended = async |_: &Wake| farm.state(jobs["above"]).await == "dep_failed";
    let heard = hints(&farm, &mut listener, work, above_ended).await;
    assert!(heard.iter().all(|wake| matches!(wake, Wake::Hint(Channel::Ended, _))), "{heard:?}");
}

#[tokio::test]
async fn builders_hear_that_a_running_build_is_to_be_stopped() {
    let farm = farm().await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    let evaluation = farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    let mut listener = listen(&farm.direct_url, &[Channel::Stop], NEVER).await;
    let work = async {
        people::end_evaluation(&farm.frontend, evaluation.id, people::Ending::Cancelled, None).await.unwrap();
    };
    let heard = hints(&farm, &mut listener, work, async |_| true).await;
    assert_eq!(heard, [Wake::Hint(Channel::Stop, String::new())]);
    assert_eq!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon, [claim.fence.job]);
}

#[tokio::test]
async fn a_build_cancelled_by_hand_is_to_be_stopped_at_once() {
    let farm = farm().await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    let mut listener = listen(&farm.direct_url, &[Channel::Stop], NEVER).await;
    assert!(people::cancel(&farm.frontend, claim.fence.job).await.unwrap());
    assert_eq!(listener.next().await, Wake::Hint(Channel::Stop, String::new()));
    assert_eq!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon, [claim.fence.job]);
}

#[tokio::test]
async fn a_thousand_ends_are_told_in_a_few_words() {
    const JOBS: usize = 1000;
    let farm = farm().await;
    let pool = farm.pool("pool", &[SYSTEM], 1000).await;
    let names: Vec<String> = (0..JOBS).map(|n| format!("job-{n}")).collect();
    let nodes = names.iter().map(|name| derivation(name, &[])).chain([derivation("last", &["job-999"])]);
    let jobs = farm.evaluate_nodes("project", nodes.collect()).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claims = node.claim(JOBS as i32).await.unwrap();
    assert_eq!(claims.len(), JOBS);
    let mut listener = listen(&farm.direct_url, &[Channel::Ready, Channel::Ended], NEVER).await;
    let fails = claims.iter().map(|claim| node.fail(claim.fence, Failure::BuildError, ""));
    stream::iter(fails).buffer_unordered(8).for_each(async |failed| assert!(failed.unwrap())).await;
    let all_ended = async |wake: &Wake| {
        matches!(wake, Wake::Hint(Channel::Ended, _)) && farm.state(jobs["last"]).await == "dep_failed"
    };
    let mut heard = hints(&farm, &mut listener, async {}, all_ended).await;
    while let Some(wake) = listener.next().now_or_never() {
        heard.push(wake);
    }
    assert!(heard.len() < JOBS / 4, "{} wake-ups for {JOBS} ends", heard.len());
}

#[tokio::test]
async fn a_payload_is_cut_to_a_hint() {
    let farm = Farm::new().await;
    let mut listener = listen(&farm.direct_url, &[Channel::Ready], NEVER).await;
    notify(&farm.operator, Channel::Ready, &"9,".repeat(100_000)).await.unwrap();
    assert_eq!(listener.next().await, Wake::Hint(Channel::Ready, "9,".repeat(100)));
}
