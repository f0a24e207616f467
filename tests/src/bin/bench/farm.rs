//! A farm in a database: a pool, projects, workers that speak through the typed calls as the pool's login.

use std::sync::Arc;
use std::time::Duration;

use harmonia_queue::builder::{Claim, Node, Session};
use harmonia_queue::ingest::{self, Ingest};
use harmonia_queue::listen::{Channel, Listener};
use harmonia_queue::people::{self, Pool, Project};
use harmonia_queue::resolver::{self, Resolver};
use harmonia_queue::signer::{self, Holder, Output, Verdict};
use harmonia_queue::{Db, Fence};
use harmonia_tests::pg::Database;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

pub const POOL_LOGIN: &str = "bench_pool";
pub const PASSWORD: &str = "bench";
const NODE_SECRET: &str = "a secret of the node";

/// A database and the ways into it.
pub struct Farm {
    pub database: Database,
    pub operator: Db,
    pub evaluator: Db,
    pub signer: Db,
}

impl Farm {
    /// The ways into a database that may have a farm already.
    pub fn of(database: Database) -> Self {
        let way = |role: &str, connections| {
            let url = database.direct_url_as(&format!("bench_{role}"), PASSWORD);
            Db::direct(&url, connections).expect("a URL")
        };
        let (operator, evaluator, signer) = (way("operator", 2), way("evaluator", 2), way("signer", 40));
        Self { operator, evaluator, signer, database }
    }

    /// A pool of x86_64-linux and so many equal projects. `features`: None for the default ones.
    pub async fn furnish(&self, projects: usize, features: Option<&[&str]>) {
        let pool = Pool {
            name: "pool",
            login: POOL_LOGIN,
            systems: vec!["x86_64-linux".into()],
            features: features.map(|features| features.iter().map(|&f| f.to_owned()).collect()),
            mandatory_features: Vec::new(),
            slots: 1024,
            memory: 0,
        };
        people::put_pool(&self.operator, &pool).await.expect("make the pool");
        for n in 0..projects {
            people::put_project(&self.operator, &Project::new(&project(n))).await.expect("make a project");
        }
        resolver::settle(&self.signer).await.expect("settle");
    }

    /// A builder's way in, with one connection as a builder has.
    pub fn builder(&self) -> Db {
        Db::direct(&self.builder_url(), 1).expect("a URL")
    }

    pub fn builder_url(&self) -> String {
        self.database.direct_url_as(POOL_LOGIN, PASSWORD)
    }

    /// A new session.
    pub async fn session(&self, db: &Db, name: &str, slots: i32) -> Session {
        Session::register(db, &Node::new(name, NODE_SECRET, slots)).await.expect("register")
    }

    /// One whole evaluation.
    pub async fn evaluate(&self, project: &str, nodes: Vec<ingest::Node>) -> i64 {
        let mut ingest = Ingest::begin(&self.evaluator, project, "bench", None, None, false)
            .await
            .expect("begin an evaluation");
        ingest.add(nodes).await.expect("ingest");
        ingest.complete(&[]).await.expect("complete")
    }

    /// Steps until nothing is left to resolve; large steps, for nothing else is going on.
    pub async fn settle(&self) {
        while resolver::step(&self.signer, 5000).await.expect("resolve").events > 0 {}
    }

    /// A resolver that runs until it is dropped.
    pub fn resolve(&self) -> Resolving {
        let resolver = Arc::new(Resolver::default());
        let (runner, db) = (resolver.clone(), self.signer.clone());
        Resolving::new(resolver, async move { runner.run(&db).await })
    }

    /// What a load leaves behind is tidied before anything is measured, as time would do it.
    pub async fn tidy(&self) {
        self.database.execute("VACUUM ANALYZE").await;
        self.database.execute("CHECKPOINT").await;
    }
}

pub fn project(n: usize) -> String {
    format!("project-{n}")
}

/// A task that ends with its owner.
pub struct Task<T>(pub JoinHandle<T>);

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs each on its own task, until all have ended.
pub async fn together<T: Send + 'static>(
    work: impl Iterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    let tasks: Vec<_> = work.map(tokio::spawn).collect();
    let mut results = Vec::with_capacity(tasks.len());
    for task in tasks {
        results.push(task.await.expect("a worker"));
    }
    results
}

/// A running resolver.
pub struct Resolving {
    pub resolver: Arc<Resolver>,
    #[expect(dead_code, reason = "ends with it")]
    task: Task<()>,
}

impl Resolving {
    /// Whoever resolves, until it is dropped; it may be nudged.
    pub fn new(resolver: Arc<Resolver>, run: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { resolver, task: Task(tokio::spawn(run)) }
    }
}

/// What a build of a claim made.
pub type Outputs = Arc<dyn Fn(&Claim) -> Vec<Output> + Send + Sync>;

/// A builder with builds of no length, and the signer that it talks to.
#[derive(Clone)]
pub struct Worker {
    pub session: Session,
    pub signer: Db,
    pub outputs: Outputs,
}

impl Worker {
    /// Upload, accept, finish: all that follows a claim.
    pub async fn complete(&self, claims: &[Claim]) {
        let fences: Vec<Fence> = claims.iter().map(|claim| claim.fence).collect();
        let held = self.session.start_upload(&fences).await.expect("start the upload");
        assert_eq!(held.len(), fences.len(), "claims were lost");
        self.accept(claims).await;
        let finished = signer::finish(&self.signer, &fences).await.expect("finish").jobs;
        assert_eq!(finished.len(), fences.len(), "results were not finished");
    }

    pub async fn accept(&self, claims: &[Claim]) {
        let results: Vec<_> = claims
            .iter()
            .map(|claim| {
                let (session, secret) = (self.session.id, self.session.secret.clone());
                (Holder { session, secret, fence: claim.fence }, (self.outputs)(claim))
            })
            .collect();
        let verdicts = signer::accept(&self.signer, &results).await.expect("accept");
        assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Accepted), "{verdicts:?}");
    }
}

/// Wake-ups as a builder hears them: any number since it last looked is one.
pub struct Ears {
    heard: Arc<Notify>,
    #[expect(dead_code, reason = "ends with it")]
    task: Task<()>,
}

impl Ears {
    pub async fn open(url: &str, poll: Duration) -> Self {
        let mut listener = Listener::connect(url.to_owned(), &[Channel::Ready], poll).await;
        assert_eq!(listener.trouble, None);
        let heard = Arc::new(Notify::new());
        let told = heard.clone();
        let task = Task(tokio::spawn(async move {
            loop {
                listener.next().await;
                told.notify_one();
            }
        }));
        Self { heard, task }
    }

    /// Until there is a reason to look, heard since the last time or yet to come.
    pub async fn wait(&self) {
        self.heard.notified().await;
    }
}
