//! Replicas and leaders: one leads, everybody knows who, a crash or a lost network frees the office, and a leader's
//! judgement waits until an outage is over.

use std::net::Ipv4Addr;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use futures::future::join_all;
use harmonia_queue::leader::{self, Leadership, Office};
use harmonia_queue::replica::{self, Replica};
use harmonia_queue::{Error, janitor};
use harmonia_tests::farm::{Farm, SYSTEM};
use harmonia_tests::pg::{Options, Server};
use harmonia_tests::{PATIENCE, eventually, skip};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use uuid::Uuid;

use crate::races::{open_words, waits};

const A: Uuid = Uuid::from_u128(0xa);
const B: Uuid = Uuid::from_u128(0xb);

fn replica(id: Uuid, url: &str) -> Replica {
    Replica { id, role: "operator".into(), url: url.into() }
}

async fn try_lead(farm: &Farm, id: Uuid) -> Option<Leadership> {
    Leadership::try_take(&farm.direct_url, Office::Janitor, id).await.unwrap()
}

/// PostgreSQL sees the end of a connection a moment after it came.
async fn lead_when_free(farm: &Farm, id: Uuid) -> Leadership {
    loop {
        if let Some(lead) = try_lead(farm, id).await {
            return lead;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn end_the_leader_s_connection(farm: &Farm) {
    let query =
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'harmonia-ci leader'
                 AND datname = current_database()";
    assert!(sqlx::query_scalar::<_, bool>(query).fetch_one(&farm.database.admin()).await.unwrap());
}

#[tokio::test]
async fn one_of_several_leads_and_the_others_do_not_wait() {
    let farm = Farm::new().await;
    let tries = join_all((1..9).map(|n| try_lead(&farm, Uuid::from_u128(n)))).await;
    assert_eq!(tries.iter().flatten().count(), 1);
}

#[tokio::test]
async fn the_two_offices_are_independent() {
    let farm = Farm::new().await;
    let _janitor = farm.lead().await;
    let operator = Leadership::try_take(&farm.direct_url, Office::Operator, B).await.unwrap();
    assert_eq!(operator.unwrap().generation, 1);
}

#[tokio::test]
async fn a_leader_of_one_database_does_not_lead_another() {
    let (one, other) = (Farm::new().await, Farm::new().await);
    let _lead = one.lead().await;
    assert!(!leader::current(&other.operator, Office::Janitor).await.unwrap().held);
    other.lead().await;
}

#[tokio::test]
async fn a_released_office_is_free() {
    let farm = Farm::new().await;
    let lead = try_lead(&farm, A).await.unwrap();
    assert!(try_lead(&farm, B).await.is_none());
    lead.release().await.unwrap();
    assert_eq!(lead_when_free(&farm, B).await.generation, 2);
}

#[tokio::test]
async fn an_ended_connection_frees_the_office_and_its_leader_notices() {
    let farm = Farm::new().await;
    let mut lead = try_lead(&farm, A).await.unwrap();
    end_the_leader_s_connection(&farm).await;
    lead_when_free(&farm, B).await;
    lead.lost().await;
}

#[tokio::test]
async fn a_killed_process_frees_the_office() {
    let farm = Farm::new().await;
    let (mut process, mut said) =
        start_leader(Command::new(std::env::current_exe().unwrap()), &farm.direct_url);
    heard(&mut said, "leads").await;
    assert!(try_lead(&farm, B).await.is_none());
    process.kill().await.unwrap();
    lead_when_free(&farm, B).await;
}

const PROCESS: &str = "HARMONIA_CI_TEST_LEADER_URL";

/// Runs the next function as a process of its own.
fn start_leader(mut command: Command, url: &str) -> (Child, Lines<BufReader<ChildStdout>>) {
    let command =
        command.args(["--exact", "leader::a_leader_as_a_process", "--ignored", "--nocapture", "--quiet"]);
    let command = command.env(PROCESS, url).stdout(Stdio::piped()).kill_on_drop(true);
    let mut process = command.spawn().unwrap();
    let said = BufReader::new(process.stdout.take().unwrap()).lines();
    (process, said)
}

async fn heard(said: &mut Lines<BufReader<ChildStdout>>, word: &str) {
    while said.next_line().await.unwrap().unwrap_or_else(|| panic!("it ended before it said {word}")) != word
    {
    }
}

#[tokio::test]
#[ignore = "other tests run it as a process of its own"]
async fn a_leader_as_a_process() {
    let Ok(url) = std::env::var(PROCESS) else { return };
    let mut lead = Leadership::try_take(&url, Office::Janitor, A).await.unwrap().unwrap();
    println!("\nleads");
    lead.lost().await;
    println!("lost\n{}", now());
}

/// Microseconds by the machine's clock, which all its processes share.
fn now() -> u128 {
    UNIX_EPOCH.elapsed().unwrap().as_micros()
}

#[tokio::test]
async fn only_the_leader_s_work_runs() {
    let farm = Farm::new().await;
    let working = Arc::new(AtomicUsize::new(0));
    let (begun, mut begins) = mpsc::unbounded_channel();
    let campaigns: Vec<_> = [A, B, Uuid::from_u128(0xc)]
        .into_iter()
        .map(|id| {
            let (db, url) = (farm.operator.clone(), farm.direct_url.clone());
            let (working, begun) = (working.clone(), begun.clone());
            let work = move |generation| {
                let (at_work, begun) = (AtWork::new(&working), begun.clone());
                async move {
                    begun.send((id, generation)).unwrap();
                    std::future::pending::<()>().await;
                    drop(at_work);
                }
            };
            (id, tokio::spawn(async move { leader::campaign(&db, &url, Office::Janitor, id, work).await }))
        })
        .collect();
    // Each time the leader goes, exactly one of the others takes over, under the next generation.
    for expected in 1..=3 {
        let (id, generation) = begins.recv().await.unwrap();
        assert_eq!((generation, working.load(Ordering::SeqCst)), (expected, 1));
        assert!(try_lead(&farm, Uuid::from_u128(9)).await.is_none());
        let (_, campaign) = campaigns.iter().find(|(candidate, _)| *candidate == id).unwrap();
        campaign.abort();
    }
}

/// Counts those at work; a dropped leader's work stops being.
struct AtWork(Arc<AtomicUsize>);

impl AtWork {
    fn new(count: &Arc<AtomicUsize>) -> AtWork {
        count.fetch_add(1, Ordering::SeqCst);
        AtWork(count.clone())
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn work_is_dropped_when_the_lock_is_lost_and_begins_again_under_a_new_generation() {
    let farm = Farm::new().await;
    let working = Arc::new(AtomicUsize::new(0));
    let (begun, mut begins) = mpsc::unbounded_channel();
    let work = |generation| {
        let at_work = AtWork::new(&working);
        begun.send(generation).unwrap();
        async move {
            std::future::pending::<()>().await;
            drop(at_work);
        }
    };
    let watch = async {
        assert_eq!(begins.recv().await, Some(1));
        end_the_leader_s_connection(&farm).await;
        assert_eq!(begins.recv().await, Some(2));
        assert_eq!(working.load(Ordering::SeqCst), 1);
    };
    tokio::select! {
        () = leader::campaign(&farm.operator, &farm.direct_url, Office::Janitor, A, work) => unreachable!(),
        () = watch => {}
    }
}

#[tokio::test]
async fn the_oldest_healthy_replica_leads_first() {
    let farm = Farm::new().await;
    let (begun, mut begins) = mpsc::unbounded_channel();
    let campaign = |id| {
        let (db, url, begun) = (farm.operator.clone(), farm.direct_url.clone(), begun.clone());
        tokio::spawn(async move {
            let work = |_| {
                begun.send(id).unwrap();
                std::future::pending()
            };
            leader::campaign(&db, &url, Office::Janitor, id, work).await;
        })
    };
    // The second's pause is a second long, and a machine may stall for longer: not every time. By chance alone it would not be
    // four times in a row.
    let mut first = Vec::new();
    while first.len() < 20 && !first.ends_with(&[Some(A); 4]) {
        replica(A, "https://a").beat(&farm.operator).await.unwrap();
        replica(B, "https://b").beat(&farm.operator).await.unwrap();
        let campaigns = [campaign(B), campaign(A)];
        first.push(begins.recv().await);
        campaigns.iter().for_each(JoinHandle::abort);
        join_all(campaigns).await;
    }
    assert!(first.ends_with(&[Some(A); 4]), "{first:?}");
}

#[tokio::test]
async fn registering_twice_moves_the_url_and_keeps_the_age() {
    let farm = Farm::new().await;
    farm.freeze().await;
    replica(A, "https://a").beat(&farm.operator).await.unwrap();
    farm.advance(1.0).await;
    replica(B, "https://b").beat(&farm.operator).await.unwrap();
    farm.advance(1.0).await;
    replica(A, "https://elsewhere").beat(&farm.operator).await.unwrap();
    let healthy = replica::healthy(&farm.operator).await.unwrap();
    assert_eq!(healthy, [replica(A, "https://elsewhere"), replica(B, "https://b")]);
}

#[tokio::test]
async fn a_replica_is_stale_after_half_a_minute_of_silence() {
    let farm = Farm::new().await;
    farm.freeze().await;
    replica(A, "https://a").beat(&farm.operator).await.unwrap();
    replica(B, "https://b").beat(&farm.operator).await.unwrap();
    farm.advance(29.0).await;
    assert_eq!(replica::healthy(&farm.operator).await.unwrap().len(), 2);
    replica(B, "https://b").beat(&farm.operator).await.unwrap();
    farm.advance(2.0).await;
    assert_eq!(replica::healthy(&farm.operator).await.unwrap(), [replica(B, "https://b")]);
}

#[tokio::test]
async fn a_replica_is_pruned_after_a_minute_of_silence_and_no_sooner() {
    let farm = Farm::new().await;
    farm.freeze().await;
    let lead = farm.lead().await;
    replica(A, "https://a").beat(&farm.operator).await.unwrap();
    let registered = || async {
        let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM ci.replica");
        count.fetch_one(&farm.database.admin()).await.unwrap()
    };
    for (seconds, left) in [(59.0, 1), (2.0, 0)] {
        farm.advance(seconds).await;
        janitor::prune(&farm.operator, lead.generation).await.unwrap();
        assert_eq!(registered().await, left);
    }
}

#[tokio::test]
async fn a_replica_that_leaves_is_gone_at_once() {
    let farm = Farm::new().await;
    let one = replica(A, "https://a");
    one.beat(&farm.operator).await.unwrap();
    one.leave(&farm.operator).await.unwrap();
    assert_eq!(replica::healthy(&farm.operator).await.unwrap(), []);
}

#[tokio::test]
async fn everybody_can_ask_where_the_leader_is() {
    let farm = Farm::new().await;
    replica(B, "https://b").beat(&farm.operator).await.unwrap();
    let nobody = leader::current(&farm.frontend, Office::Janitor).await.unwrap();
    assert_eq!((nobody.held, nobody.url, nobody.generation), (false, None, 0));
    let lead = try_lead(&farm, B).await.unwrap();
    for db in [&farm.operator, &farm.frontend, &farm.evaluator, &farm.signer] {
        let current = leader::current(db, Office::Janitor).await.unwrap();
        assert_eq!((current.held, current.replica, current.generation), (true, Some(B), 1));
        assert_eq!(current.url.as_deref(), Some("https://b"));
    }
    lead.release().await.unwrap();
    while leader::current(&farm.frontend, Office::Janitor).await.unwrap().held {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_former_leader_s_work_is_refused() {
    let farm = Farm::new().await;
    let former = farm.lead().await;
    let generation = former.generation;
    janitor::clean_up(&farm.operator, generation).await.unwrap();
    former.release().await.unwrap();
    lead_when_free(&farm, B).await;
    let db = &farm.operator;
    let refusals = [
        janitor::reap(db, generation).await.map(drop),
        janitor::end_long_transactions(db, generation).await.map(drop),
        janitor::fail_unsupported(db, generation).await.map(drop),
        janitor::decay(db, generation).await.map(drop),
        janitor::prune(db, generation).await,
        janitor::retain(db, generation).await.map(drop),
    ];
    for refusal in refusals {
        let sentence = refusal.unwrap_err();
        assert!(matches!(&sentence, Error::NotLeader(_)), "{sentence:?}");
        assert_eq!(sentence.to_string(), "generation 1 of the janitor is over: another leads");
    }
    // The loop ends by itself.
    janitor::run(db, generation).await;
}

#[tokio::test]
async fn a_duty_that_fails_keeps_the_janitor_from_no_other() {
    let farm = Farm::new().await;
    farm.freeze().await;
    let lead = farm.lead().await;
    replica(A, "https://a").beat(&farm.operator).await.unwrap();
    farm.advance(61.0).await;
    farm.database
        .execute(
            "CREATE OR REPLACE FUNCTION ci.fail_unsupported(p_generation bigint) RETURNS int LANGUAGE sql
             AS 'SELECT 1 / (p_generation - p_generation)::int'",
        )
        .await;
    let round = janitor::clean_up(&farm.operator, lead.generation).await;
    assert!(matches!(round, Err(Error::Database(_))), "{round:?}");
    let left: i64 = farm.value("SELECT count(*) FROM ci.replica WHERE $1 = 0", 0).await;
    assert_eq!(left, 0);
}

#[tokio::test]
async fn leases_wait_for_no_other_duty() {
    let farm = Farm::new().await;
    let lead = farm.lead().await;
    let held = open_words(&farm, "SELECT FROM ci.resolver FOR UPDATE").await;
    let (db, generation) = (farm.operator.clone(), lead.generation);
    let work = tokio::spawn(async move { janitor::run(&db, generation).await });
    assert!(waits(&farm, &work).await, "clearing up waits");
    let looked = "SELECT looked_at::text FROM ci.leadership WHERE name = 'janitor' AND $1 = 0";
    let first: String = farm.value(looked, 0).await;
    eventually("leases are looked at again", || async { farm.value::<String>(looked, 0).await != first })
        .await;
    work.abort();
    drop(held);
}

#[tokio::test]
async fn nobody_leads_without_the_lock() {
    let farm = Farm::new().await;
    let _lead = farm.lead().await;
    let operator = farm.database.direct_login("harmonia_operator").await;
    let begin = sqlx::query("SELECT ci.lead('janitor', $1)").bind(B).execute(&operator).await;
    let error = Error::from(begin.unwrap_err());
    assert_eq!(error.to_string(), "this connection does not hold the lock of the janitor");
}

#[tokio::test]
async fn nothing_else_runs_on_the_leader_s_connection() {
    let farm = Farm::new().await;
    let lead = farm.lead().await;
    let seen = || async {
        let query = "SELECT pid, state, query, query_start::text FROM pg_stat_activity
                     WHERE application_name = 'harmonia-ci leader' AND datname = current_database()";
        let rows: Vec<(i32, String, String, String)> =
            sqlx::query_as(query).fetch_all(&farm.database.admin()).await.unwrap();
        rows
    };
    let before = seen().await;
    assert_eq!((before.len(), before[0].1.as_str()), (1, "idle"));
    janitor::keep_order(&farm.operator, lead.generation).await.unwrap();
    janitor::clean_up(&farm.operator, lead.generation).await.unwrap();
    replica(A, "https://a").beat(&farm.operator).await.unwrap();
    leader::current(&farm.operator, Office::Janitor).await.unwrap();
    assert_eq!(seen().await, before);
}

#[tokio::test]
async fn the_reaper_judges_nothing_before_it_has_led_for_a_lease() {
    let farm = Farm::new().await;
    farm.freeze().await;
    farm.project("project").await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    let jobs = farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    farm.claim(&node).await;
    farm.advance(300.0).await;
    let lead = farm.lead().await;
    for seconds in [0.0, 119.0] {
        farm.advance(seconds).await;
        assert_eq!(janitor::reap(&farm.operator, lead.generation).await.unwrap(), 0);
        assert_eq!(farm.state(jobs["a"]).await, "building");
    }
    farm.advance(2.0).await;
    assert_eq!(janitor::reap(&farm.operator, lead.generation).await.unwrap(), 1);
    assert_eq!(farm.state(jobs["a"]).await, "blocked");
    farm.assert_sound().await;
}

#[tokio::test]
async fn no_attempt_is_lost_to_an_outage_of_five_minutes() {
    let farm = Farm::new().await;
    farm.freeze().await;
    farm.project("project").await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    let before = farm.lead().await;
    farm.advance(121.0).await;
    node.heartbeat(&[claim.fence], None).await.unwrap();
    assert_eq!(janitor::reap(&farm.operator, before.generation).await.unwrap(), 0);

    end_the_leader_s_connection(&farm).await;
    farm.advance(300.0).await;
    let after = lead_when_free(&farm, B).await;
    // The reaper is back before the builder is.
    assert_eq!(janitor::reap(&farm.operator, after.generation).await.unwrap(), 0);
    farm.advance(100.0).await;
    assert_eq!(janitor::reap(&farm.operator, after.generation).await.unwrap(), 0);
    assert_eq!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon, Vec::<i64>::new());
    farm.advance(30.0).await;
    assert_eq!(janitor::reap(&farm.operator, after.generation).await.unwrap(), 0);
    farm.succeed(&node, &claim).await;
}

#[tokio::test]
async fn a_heartbeat_revives_a_lease_that_ended_but_was_not_reaped() {
    let farm = Farm::new().await;
    farm.freeze().await;
    farm.project("project").await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    farm.evaluate("project", &[("a", &[])]).await;
    let lead = farm.lead().await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    farm.advance(200.0).await;
    node.heartbeat(&[claim.fence], None).await.unwrap();
    assert_eq!(janitor::reap(&farm.operator, lead.generation).await.unwrap(), 0);
    farm.succeed(&node, &claim).await;
}

/// A network of two ends, this one and one in a namespace that ends with the process that keeps it.
struct Wire {
    keeper: Child,
    here: Ipv4Addr,
    there: Ipv4Addr,
    name: String,
}

impl Wire {
    /// The reason if there can be none.
    async fn new() -> Result<Wire, String> {
        let keeper = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo; exec cat"])
            .kill_on_drop(true)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut keeper = keeper.map_err(|error| format!("unshare cannot be run: {error}"))?;
        let mut ready = BufReader::new(keeper.stdout.take().unwrap()).lines();
        ready.next_line().await.ok().flatten().ok_or("this user may not make a network namespace")?;
        let own = std::process::id();
        let [_, b, c, d] = own.to_be_bytes();
        let here = Ipv4Addr::new(10, 128 | b, c, d & 0b1111_1100 | 1);
        let there = Ipv4Addr::from(u32::from(here) + 1);
        let wire = Wire { keeper, here, there, name: format!("hci{own}") };
        let (name, pid) = (&wire.name, wire.pid());
        run(&format!("ip link add {name}a type veth peer name {name}b netns {pid}")).await?;
        run(&format!("ip addr add {here}/30 dev {name}a")).await?;
        run(&format!("ip link set {name}a up")).await?;
        wire.run_there(&format!("ip addr add {there}/30 dev {name}b")).await?;
        wire.run_there(&format!("ip link set {name}b up")).await?;
        Ok(wire)
    }

    fn pid(&self) -> u32 {
        self.keeper.id().expect("the keeper lives")
    }

    fn there(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &self.pid().to_string(), "--"]);
        command
    }

    async fn run_there(&self, command: &str) -> Result<(), String> {
        finish(self.there().args(command.split(' '))).await
    }

    /// From here on packets vanish without a word: each end addresses a card that does not exist.
    async fn cut(&self) {
        const NOBODY: &str = "02:00:00:00:00:99";
        let Wire { here, there, name, .. } = self;
        run(&format!("ip neigh replace {there} lladdr {NOBODY} dev {name}a nud permanent")).await.unwrap();
        let cut = format!("ip neigh replace {here} lladdr {NOBODY} dev {name}b nud permanent");
        self.run_there(&cut).await.unwrap();
    }
}

async fn run(command: &str) -> Result<(), String> {
    let mut words = command.split(' ');
    finish(Command::new(words.next().unwrap()).args(words)).await
}

async fn finish(command: &mut Command) -> Result<(), String> {
    let output = command.output().await.map_err(|error| format!("{command:?}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

#[tokio::test]
async fn when_packets_vanish_another_leads_after_the_former_leader_has_stopped() {
    let wire = match Wire::new().await {
        Ok(wire) => wire,
        Err(reason) => {
            return skip(&format!("a network namespace is needed: {reason}"));
        }
    };
    let server = Server::start(Options { listen: Some(wire.here.to_string()), ..Options::default() });
    let farm = Farm::on(server.database().await).await;
    let login = farm.database.make_login("harmonia_operator").await;
    let (here, port, name) = (wire.here, server.port(), farm.database.name());
    let url = format!("postgres://{}:{}@{here}:{port}/{name}", login.role, login.password);
    let mut there = wire.there();
    there.arg(std::env::current_exe().unwrap());
    let (_process, mut said) = start_leader(there, &url);
    heard(&mut said, "leads").await;
    assert!(try_lead(&farm, B).await.is_none());

    wire.cut().await;
    let (begun, mut begins) = mpsc::unbounded_channel();
    let work = |_| {
        begun.send(now()).unwrap();
        std::future::pending()
    };
    let watch = async {
        heard(&mut said, "lost").await;
        let stopped: u128 = said.next_line().await.unwrap().unwrap().parse().unwrap();
        let began = begins.recv().await.unwrap();
        assert!(stopped < began, "the former leader stopped at {stopped}, the next began at {began}");
    };
    let campaign = leader::campaign(&farm.operator, &farm.direct_url, Office::Janitor, B, work);
    let both = async {
        tokio::select! {
            () = campaign => unreachable!(),
            () = watch => {}
        }
    };
    timeout(PATIENCE, both).await.expect("somebody leads again");
}
