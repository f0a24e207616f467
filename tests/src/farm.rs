//! A farm in a database of its own: what every behaviour test begins with.

use std::collections::{BTreeMap, HashMap};
use std::ops::Index;

use harmonia_queue::builder::{self, Claim, Session};
use harmonia_queue::ingest::{Ingest, Node};
use harmonia_queue::leader::{Leadership, Office};
use harmonia_queue::people::{self, Pool, Project};
use harmonia_queue::signer::{self, Holder, Output, Verdict};
use harmonia_queue::{Db, logins, resolver};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::pg::{Database, Login, Server};

/// The system of everything that does not say otherwise.
pub const SYSTEM: &str = "x86_64-linux";

/// Connections that a pool's login may hold at once.
const CONNECTIONS: i32 = 60;

/// A migrated database and one way into it for each role of the control plane.
pub struct Farm {
    /// The database, for what no role may do.
    pub database: Database,
    /// A login of the operator.
    pub operator: Db,
    /// A login of a frontend.
    pub frontend: Db,
    /// A login of an evaluator.
    pub evaluator: Db,
    /// A login of a signer.
    pub signer: Db,
    /// Where leaders connect: past the pooler, which would keep the lock.
    pub direct_url: String,
}

/// A pool and its login.
pub struct PoolHandle {
    /// Its id.
    pub id: i32,
    /// Its name.
    pub name: String,
    /// The login of its builders.
    pub login: Login,
    /// That login's way into the database.
    pub db: Db,
}

/// An evaluation; `evaluation["name"]` is the job of the derivation of that short name.
pub struct Evaluation {
    /// Its id.
    pub id: i64,
    jobs: HashMap<String, i64>,
}

impl Index<&str> for Evaluation {
    type Output = i64;

    fn index(&self, name: &str) -> &i64 {
        self.jobs.get(name).unwrap_or_else(|| panic!("no derivation {name} was evaluated"))
    }
}

impl Farm {
    /// A farm on the shared server.
    pub async fn new() -> Farm {
        Farm::on(Server::shared().database().await).await
    }

    /// A farm in a database that was made otherwise.
    pub async fn on(database: Database) -> Farm {
        let operator = database.make_login("harmonia_operator").await;
        Farm {
            operator: operator.db(),
            direct_url: operator.direct_url,
            frontend: database.make_login("harmonia_frontend").await.db(),
            evaluator: database.make_login("harmonia_evaluator").await.db(),
            signer: database.make_login("harmonia_signer").await.db(),
            database,
        }
    }

    /// A farm whose time stands still, with the project `main`, a pool and one node of so many slots.
    pub async fn small(slots: i32) -> (Farm, PoolHandle, Session) {
        let farm = Farm::new().await;
        farm.freeze().await;
        farm.project("main").await;
        let pool = farm.pool("pool", &[SYSTEM], slots).await;
        let node = farm.node(&pool, "node").await;
        farm.settle().await;
        (farm, pool, node)
    }

    /// A pool with Nix's default features and a login of its own.
    pub async fn pool(&self, name: &str, systems: &[&str], slots: i32) -> PoolHandle {
        let systems = systems.iter().map(|&system| system.to_owned()).collect();
        self.put_pool(Pool {
            name,
            login: "",
            systems,
            features: None,
            mandatory_features: Vec::new(),
            slots,
            memory: 0,
        })
        .await
    }

    /// A pool as described, but with a login of its own.
    pub async fn put_pool(&self, pool: Pool<'_>) -> PoolHandle {
        let role = self.database.server().unique("pool");
        let password = format!("{role}_secret");
        let admin = self.database.direct_url();
        logins::ensure(&admin, &role, &password, CONNECTIONS).await.expect("make the pool's login");
        let id = people::put_pool(&self.operator, &Pool { login: &role, ..pool.clone() }).await;
        let login = self.database.known_login(&role, &password);
        PoolHandle { id: id.expect("make the pool"), name: pool.name.to_owned(), db: login.db(), login }
    }

    /// A project with the defaults.
    pub async fn project(&self, name: &str) -> i32 {
        self.put_project(Project::new(name)).await
    }

    /// A project as described.
    pub async fn put_project(&self, project: Project<'_>) -> i32 {
        people::put_project(&self.operator, &project).await.expect("make the project")
    }

    /// A new life of a node with all the slots of its pool. The same name is the same node.
    pub async fn node(&self, pool: &PoolHandle, name: &str) -> Session {
        let node = builder::Node::new(name, "the secret of a node", i32::MAX);
        Session::register(&pool.db, &node).await.expect("register a node")
    }

    /// A complete evaluation of derivations by short names, each with its inputs' names.
    pub async fn evaluate(&self, project: &str, graph: &[(&str, &[&str])]) -> Evaluation {
        self.evaluate_nodes(project, graph.iter().map(|(name, inputs)| derivation(name, inputs)).collect())
            .await
    }

    /// The same, resolved.
    pub async fn queue(&self, project: &str, graph: &[(&str, &[&str])]) -> Evaluation {
        let evaluation = self.evaluate(project, graph).await;
        self.settle().await;
        evaluation
    }

    /// A complete evaluation of derivations with peculiarities.
    pub async fn evaluate_nodes(&self, project: &str, nodes: Vec<Node>) -> Evaluation {
        let mut ingest = self.begin(project).await;
        let paths: Vec<String> = nodes.iter().map(|node| node.drv_path.clone()).collect();
        ingest.add(nodes).await.expect("add derivations");
        let job = |path: &String| (short_name(path).to_owned(), ingest.job(path).expect("a job"));
        let jobs = paths.iter().map(job).collect();
        Evaluation { id: ingest.complete(&[]).await.expect("complete the evaluation"), jobs }
    }

    /// An evaluation to be written by hand.
    pub async fn begin(&self, project: &str) -> Ingest {
        Ingest::begin(&self.evaluator, project, "git", Some("main"), None, false)
            .await
            .expect("begin to evaluate")
    }

    /// Resolves all that there is to resolve.
    pub async fn settle(&self) {
        resolver::settle(&self.operator).await.expect("resolve");
    }

    /// Claims one job, which there must be.
    pub async fn claim(&self, session: &Session) -> Claim {
        session.claim(1).await.expect("claim").pop().expect("something to claim")
    }

    /// The short names of up to so many jobs that it claims, sorted: a batch has no order.
    pub async fn claim_names(&self, session: &Session, want: i32) -> Vec<String> {
        let claims = session.claim(want).await.expect("claim");
        let mut names: Vec<String> = claims.iter().map(|claim| name(claim).to_owned()).collect();
        names.sort();
        names
    }

    /// Builds whatever it can claim, one after the other; answers their short names in that order.
    pub async fn build_all(&self, session: &Session) -> Vec<String> {
        let mut built = Vec::new();
        while let Some(claim) = session.claim(1).await.expect("claim").pop() {
            self.succeed(session, &claim).await;
            self.settle().await;
            built.push(name(&claim).to_owned());
        }
        built
    }

    /// The whole way of a build that goes well.
    pub async fn succeed(&self, session: &Session, claim: &Claim) {
        session.start_upload(&[claim.fence]).await.expect("start the upload");
        let verdict = self.accept(session, claim).await;
        assert!(matches!(verdict, Verdict::Accepted | Verdict::Adopted), "{verdict:?}");
        let finished = signer::finish(&self.signer, &[claim.fence]).await.expect("finish").jobs;
        assert_eq!(finished, [claim.fence.job]);
    }

    /// A signer takes the outputs that such a build would have.
    pub async fn accept(&self, session: &Session, claim: &Claim) -> Verdict {
        let holder = holder(session, claim);
        let live = signer::check_claim(&self.signer, &holder).await.expect("check the claim");
        let outputs = live.map(|live| live.outputs).unwrap_or_default().into_iter().map(|(name, path)| {
            output(
                &name,
                path.as_deref().unwrap_or(&store_path(&format!("{name} of {}", claim.drv_path), &name)),
            )
        });
        let results = [(holder, outputs.collect())];
        signer::accept(&self.signer, &results).await.expect("accept")[0]
    }

    /// `blocked`, `ready`, `building`, `uploading` or `accepted` while it is open; else how it ended.
    pub async fn state(&self, job: i64) -> String {
        sqlx::query_scalar(
            "SELECT coalesce(r.phase::text, CASE WHEN y.job_id IS NOT NULL THEN 'ready' WHEN b.job_id IS NOT NULL THEN 'blocked' END,
                             j.state::text)
             FROM ci.job j LEFT JOIN ci.running r ON r.job_id = j.id LEFT JOIN ci.ready y ON y.job_id = j.id
             LEFT JOIN ci.blocked b ON b.job_id = j.id WHERE j.id = $1",
        )
        .bind(job)
        .fetch_one(&self.database.admin())
        .await
        .expect("the job exists")
    }

    /// One value by the superuser's SQL, whose `$1` is an id.
    pub async fn value<T>(&self, sql: &'static str, id: i64) -> T
    where
        T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    {
        let value = sqlx::query_scalar(sql).bind(id).fetch_one(&self.database.admin()).await;
        value.unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// The node of a session.
    pub async fn node_of(&self, session: &Session) -> i32 {
        self.value("SELECT node_id FROM ci.session WHERE id = $1", session.id).await
    }

    /// Why a job is not running, by codes.
    pub async fn why(&self, job: i64) -> Vec<String> {
        let why = people::why(&self.frontend, job).await.expect("ask why");
        why.into_iter().map(|(code, _)| code).collect()
    }

    /// Nothing is wrong with the queue.
    pub async fn assert_sound(&self) {
        let mut audit = people::audit(&self.operator).await;
        // Of a connection that was used a moment before its server stopped nobody knows that it is lost. There are a few.
        for _ in 0..10 {
            if audit.as_ref().is_err_and(harmonia_queue::Error::is_transient) {
                audit = people::audit(&self.operator).await;
            }
        }
        assert_eq!(audit.expect("audit"), []);
    }

    /// A digest of every table of the queue, to show that nothing, or what, was changed.
    pub async fn digest(&self) -> BTreeMap<String, String> {
        let query = "SELECT tablename::text, (xpath('//md5/text()', query_to_xml(format($$
                       SELECT count(*) || md5(coalesce(string_agg(t::text, chr(10) ORDER BY t::text), '')) AS md5 FROM ci.%I t
                     $$, tablename), false, true, '')))[1]::text FROM pg_tables WHERE schemaname = 'ci'";
        let rows = sqlx::query_as(query).fetch_all(&self.database.admin()).await;
        rows.expect("read every table").into_iter().collect()
    }

    /// From here on, whoever connects and then waits for a lock gets an error: to be called before anybody does.
    pub async fn forbid_waiting(&self) {
        let name = self.database.name();
        self.database.execute(&format!("ALTER DATABASE {name} SET lock_timeout = '60s'")).await;
    }

    /// Leads as the janitor; nobody else may.
    pub async fn lead(&self) -> Leadership {
        let lead = Leadership::try_take(&self.direct_url, Office::Janitor, Uuid::from_u128(1)).await;
        lead.expect("try to lead").expect("nobody else leads")
    }

    /// Leads as the operator; nobody else may.
    pub async fn operate(&self) -> Leadership {
        let lead = Leadership::try_take(&self.direct_url, Office::Operator, Uuid::from_u128(2)).await;
        lead.expect("try to lead").expect("nobody else leads")
    }

    /// From here on time passes by [`Farm::advance`] only.
    pub async fn freeze(&self) {
        self.database.freeze_clock().await;
    }

    /// Lets time pass, in which a reaper goes on looking.
    pub async fn advance(&self, seconds: f64) {
        self.database.advance(seconds).await;
        self.database.execute("UPDATE ci.leadership SET looked_at = ci.clock()").await;
    }

    /// Lets time pass and the resolver notice it.
    pub async fn pass(&self, seconds: f64) {
        self.advance(seconds).await;
        self.settle().await;
    }
}

/// A derivation with one output, by its short name and those of its inputs.
pub fn derivation(name: &str, inputs: &[&str]) -> Node {
    Node {
        drv_path: drv_path(name),
        system: SYSTEM.to_owned(),
        aterm: Some(format!("Derive({name})").into_bytes()),
        outputs: vec![("out".to_owned(), Some(store_path(name, name)))],
        inputs: inputs.iter().map(|input| drv_path(input)).collect(),
        ..Node::default()
    }
}

/// The path of the derivation of a short name.
pub fn drv_path(name: &str) -> String {
    let file = format!("{name}.drv");
    store_path(&file, &file)
}

/// A plausible store path, always the same for the same words.
pub fn store_path(seed: &str, name: &str) -> String {
    const ALPHABET: &[u8; 32] = b"0123456789abcdfghijklmnpqrsvwxyz";
    let hash: String =
        Sha256::digest(seed).iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)])).collect();
    format!("/nix/store/{hash}-{name}")
}

/// A claim as its builder shows it to a signer.
pub fn holder(session: &Session, claim: &Claim) -> Holder {
    Holder { session: session.id, secret: session.secret.clone(), fence: claim.fence }
}

/// An output as a signer would record it, its bytes following from its path.
pub fn output(name: &str, path: &str) -> Output {
    Output {
        name: name.to_owned(),
        path: path.to_owned(),
        nar_hash: Sha256::digest(path).to_vec(),
        nar_size: 1,
        references: Vec::new(),
        file_hash: Sha256::digest(path).to_vec(),
        file_size: 1,
        content_address: None,
        made_by: None,
    }
}

/// The short name of a claimed derivation.
pub fn name(claim: &Claim) -> &str {
    short_name(&claim.drv_path)
}

fn short_name(drv_path: &str) -> &str {
    drv_path.strip_suffix(".drv").and_then(|path| path.get("/nix/store/".len() + 33..)).unwrap_or(drv_path)
}
