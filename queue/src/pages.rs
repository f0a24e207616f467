//! What the web pages show besides what the API does: pictures of many builds at once, each by a bounded number of rows.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::people::Scope;
use crate::{Db, Result};

/// What may have changed since the last look, as numbers that differ if it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pulse {
    running: Option<i64>,
    nodes: Option<i64>,
    evaluations: Option<i64>,
}

/// Looks.
pub async fn pulse(db: &Db) -> Result<Pulse> {
    let row = db.row(sqlx::query("SELECT * FROM ci.pulse()")).await?;
    Ok(Pulse { running: row.try_get(0)?, nodes: row.try_get(1)?, evaluations: row.try_get(2)? })
}

/// Attempts that ended within a minute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Minute {
    /// Well,
    pub succeeded: i64,
    /// or with a failure.
    pub failed: i64,
}

/// The last hour by minute, the oldest first.
pub async fn throughput(db: &Db) -> Result<Vec<Minute>> {
    let query = sqlx::query(
        "SELECT floor(extract(epoch FROM ci.clock() - ended_at) / 60)::int, count(*) FILTER (WHERE outcome = 'succeeded'),
           count(*) FILTER (WHERE outcome NOT IN ('succeeded', 'interrupted', 'cancelled'))
         FROM ci.attempt WHERE ended_at > ci.clock() - interval '1 hour' GROUP BY 1",
    );
    let mut minutes = vec![Minute::default(); 60];
    for row in db.rows(query).await? {
        let ago = usize::try_from(row.try_get::<i32, _>(0)?).unwrap_or(0);
        if let Some(minute) = minutes.iter_mut().rev().nth(ago) {
            *minute = Minute { succeeded: row.try_get(1)?, failed: row.try_get(2)? };
        }
    }
    Ok(minutes)
}

/// Builds of an evaluation at one depth of the graph that are equally far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The longest chain of builds below them.
    pub depth: i32,
    /// waiting, running, succeeded, cached, failed, dep_failed or cancelled.
    pub state: String,
    /// How many.
    pub builds: i64,
}

/// As [`Layer::state`] has it.
const STATE: &str = "CASE WHEN r.job_id IS NOT NULL THEN 'running' WHEN j.state = 'open' THEN 'waiting' ELSE j.state::text END";

/// The graph of an evaluation, layer by layer.
pub async fn layers(db: &Db, evaluation: i64) -> Result<Vec<Layer>> {
    let text = format!(
        "SELECT j.depth, {STATE}, count(*) FROM ci.want w JOIN ci.job j ON j.id = w.job_id LEFT JOIN ci.running r ON r.job_id = j.id
         WHERE w.evaluation_id = $1 GROUP BY 1, 2 ORDER BY 1, 2"
    );
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(evaluation)).await?;
    rows.iter()
        .map(|row| Ok(Layer { depth: row.try_get(0)?, state: row.try_get(1)?, builds: row.try_get(2)? }))
        .collect()
}

/// A build and its place in a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vertex {
    /// Its number.
    pub id: i64,
    /// Its derivation.
    pub drv_path: String,
    /// The longest chain of builds below it.
    pub depth: i32,
    /// As in a [`Layer`].
    pub state: String,
}

/// A small graph.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Graph {
    /// Its builds, by depth.
    pub vertices: Vec<Vertex>,
    /// Which needs which.
    pub edges: Vec<(i64, i64)>,
}

/// The graph of a small evaluation, at most `limit` builds of it.
pub async fn graph(db: &Db, evaluation: i64, limit: i64) -> Result<Graph> {
    let text = format!(
        "SELECT j.id, j.drv_path, j.depth, {STATE} FROM ci.want w JOIN ci.job j ON j.id = w.job_id LEFT JOIN ci.running r ON r.job_id = j.id
         WHERE w.evaluation_id = $1 ORDER BY j.depth, j.id LIMIT $2"
    );
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(evaluation).bind(limit)).await?;
    let vertices = rows.iter().map(vertex).collect::<Result<Vec<_>>>()?;
    let ids: Vec<i64> = vertices.iter().map(|vertex| vertex.id).collect();
    let query = sqlx::query(
        "SELECT referrer, input FROM ci.job_input WHERE referrer = ANY ($1) AND input = ANY ($1)",
    );
    let rows = db.rows(query.bind(&ids)).await?;
    let edges = rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect::<Result<_>>()?;
    Ok(Graph { vertices, edges })
}

fn vertex(row: &PgRow) -> Result<Vertex> {
    Ok(Vertex {
        id: row.try_get(0)?,
        drv_path: row.try_get(1)?,
        depth: row.try_get(2)?,
        state: row.try_get(3)?,
    })
}

/// Attributes of an evaluation that are equally far: the first ones of them, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// broken (it could not be evaluated), or as in a [`Layer`].
    pub state: String,
    /// How many there are.
    pub all: i64,
    /// The first ones.
    pub first: Vec<Attribute>,
}

/// An attribute of an evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attribute {
    /// Its path.
    pub name: String,
    /// Its build,
    pub build: Option<i64>,
    /// or Nix's own words.
    pub error: Option<String>,
}

/// The attributes of an evaluation by how far they are, and of each kind the first `limit` ones.
pub async fn groups(db: &Db, evaluation: i64, limit: i64) -> Result<Vec<Group>> {
    let text = format!(
        "SELECT y.state, y.total, y.attr, y.job_id, y.error FROM (
           SELECT x.*, row_number() OVER (PARTITION BY x.state ORDER BY x.attr) AS n, count(*) OVER (PARTITION BY x.state) AS total FROM (
             SELECT a.attr, a.job_id, a.error, CASE WHEN a.error IS NOT NULL THEN 'broken' ELSE {STATE} END AS state
             FROM ci.evaluation_attr a LEFT JOIN ci.job j ON j.id = a.job_id LEFT JOIN ci.running r ON r.job_id = a.job_id
             WHERE a.evaluation_id = $1) x) y
         WHERE y.n <= $2 ORDER BY y.state, y.attr"
    );
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(evaluation).bind(limit)).await?;
    let mut groups: Vec<Group> = Vec::new();
    for row in &rows {
        let state: String = row.try_get(0)?;
        if groups.last().is_none_or(|group| group.state != state) {
            groups.push(Group { state, all: row.try_get(1)?, first: Vec::new() });
        }
        if let Some(group) = groups.last_mut() {
            group.first.push(attribute(row, 2)?);
        }
    }
    Ok(groups)
}

/// The attributes of one [`Group`] from the one after `after` on.
pub async fn group(db: &Db, evaluation: i64, state: &str, after: &str, limit: i64) -> Result<Vec<Attribute>> {
    let text = format!(
        "SELECT a.attr, a.job_id, a.error FROM ci.evaluation_attr a LEFT JOIN ci.job j ON j.id = a.job_id LEFT JOIN ci.running r ON r.job_id = a.job_id
         WHERE a.evaluation_id = $1 AND a.attr > $2 AND CASE WHEN a.error IS NOT NULL THEN 'broken' ELSE {STATE} END = $3
         ORDER BY a.attr LIMIT $4"
    );
    let query = sqlx::query(sqlx::AssertSqlSafe(text)).bind(evaluation).bind(after).bind(state).bind(limit);
    db.rows(query).await?.iter().map(|row| attribute(row, 0)).collect()
}

fn attribute(row: &PgRow, first: usize) -> Result<Attribute> {
    Ok(Attribute {
        name: row.try_get(first)?,
        build: row.try_get(first + 1)?,
        error: row.try_get(first + 2)?,
    })
}

/// What an evaluation changed against the one before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Attributes that fail and did not,
    pub failing: Vec<Attribute>,
    /// and that do not and did.
    pub fixed: Vec<Attribute>,
}

/// The evaluation of the same branch before this one; without a branch, of the same source.
pub async fn previous(db: &Db, evaluation: i64) -> Result<Option<i64>> {
    let query = sqlx::query(
        "SELECT p.id FROM ci.evaluation e CROSS JOIN LATERAL (
           (SELECT q.id FROM ci.evaluation q WHERE q.project_id = e.project_id AND q.branch = e.branch AND q.id < e.id AND q.state = 'complete'
            ORDER BY q.id DESC LIMIT 1)
           UNION ALL
           (SELECT q.id FROM ci.evaluation q WHERE q.project_id = e.project_id AND q.branch IS NULL AND e.branch IS NULL AND q.source = e.source
              AND q.id < e.id AND q.state = 'complete' ORDER BY q.id DESC LIMIT 1)) p WHERE e.id = $1",
    );
    Ok(db.column(query.bind(evaluation)).await?.into_iter().next())
}

/// What differs between two evaluations, up to 200 attributes. The same derivation is as far in both.
pub async fn changes(db: &Db, evaluation: i64, previous: i64) -> Result<Changes> {
    let query = sqlx::query(
        "WITH x AS (
           SELECT a.attr, a.job_id, a.error, b.job_id AS old_job, b.error AS old_error FROM ci.evaluation_attr a
           JOIN ci.evaluation_attr b ON b.evaluation_id = $2 AND b.attr = a.attr WHERE a.evaluation_id = $1 AND a.job_id IS DISTINCT FROM b.job_id),
         y AS (
           SELECT x.attr, x.job_id, x.error, x.error IS NOT NULL OR j.state IN ('failed', 'dep_failed') AS bad, j.state IN ('succeeded', 'cached') AS good,
             x.old_error IS NOT NULL OR k.state IN ('failed', 'dep_failed') AS was_bad, k.state IN ('succeeded', 'cached') AS was_good
           FROM x LEFT JOIN ci.job j ON j.id = x.job_id LEFT JOIN ci.job k ON k.id = x.old_job)
         SELECT y.attr, y.job_id, y.error, y.bad FROM y WHERE y.bad AND y.was_good OR y.good AND y.was_bad ORDER BY y.bad DESC, y.attr LIMIT 200",
    );
    let mut changes = Changes::default();
    for row in db.rows(query.bind(evaluation).bind(previous)).await? {
        let list = if row.try_get::<Option<bool>, _>(3)? == Some(true) {
            &mut changes.failing
        } else {
            &mut changes.fixed
        };
        list.push(attribute(&row, 0)?);
    }
    Ok(changes)
}

/// A build that the end of an evaluation waited for, in seconds since that was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Its number.
    pub id: i64,
    /// Its derivation.
    pub drv_path: String,
    /// Where it was built.
    pub node: Option<String>,
    /// When a builder claimed it,
    pub claimed: f64,
    /// and when it ended, or how late it is.
    pub ended: f64,
    /// As in a [`Layer`].
    pub state: String,
}

/// What an evaluation waited for: from the build that ended last (or has run longest) down, always the input that came last.
/// The first one first, 200 at most.
pub async fn critical_path(db: &Db, evaluation: i64) -> Result<Vec<Step>> {
    let text = format!(
        "WITH RECURSIVE e AS (SELECT id, created_at FROM ci.evaluation WHERE id = $1),
         last AS (SELECT j.id FROM e JOIN ci.want w ON w.evaluation_id = e.id JOIN ci.job j ON j.id = w.job_id LEFT JOIN ci.running r ON r.job_id = j.id
           WHERE r.job_id IS NOT NULL OR (j.ended_at >= e.created_at AND j.state IN ('succeeded', 'failed'))
           ORDER BY r.claimed_at, j.ended_at DESC LIMIT 1),
         chain (id, n) AS (SELECT id, 0 FROM last UNION ALL
           SELECT x.id, c.n + 1 FROM chain c CROSS JOIN LATERAL (
             SELECT q.id FROM ci.job_input i JOIN ci.job q ON q.id = i.input, e WHERE i.referrer = c.id AND q.state = 'succeeded' AND q.ended_at >= e.created_at
             ORDER BY q.ended_at DESC LIMIT 1) x WHERE c.n < 199)
         SELECT j.id, j.drv_path, n.name, extract(epoch FROM a.claimed_at - e.created_at)::float8,
           extract(epoch FROM coalesce(j.ended_at, ci.clock()) - e.created_at)::float8, {STATE}
         FROM chain c JOIN ci.job j ON j.id = c.id CROSS JOIN e LEFT JOIN ci.running r ON r.job_id = c.id
         JOIN LATERAL (SELECT x.session_id, x.claimed_at FROM (
             SELECT session_id, claimed_at FROM ci.running WHERE job_id = c.id UNION ALL SELECT session_id, claimed_at FROM ci.attempt WHERE job_id = c.id) x
           ORDER BY x.claimed_at DESC LIMIT 1) a ON true
         LEFT JOIN ci.session s ON s.id = a.session_id LEFT JOIN ci.node n ON n.id = s.node_id ORDER BY c.n DESC"
    );
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(evaluation)).await?;
    rows.iter()
        .map(|row| {
            Ok(Step {
                id: row.try_get(0)?,
                drv_path: row.try_get(1)?,
                node: row.try_get(2)?,
                claimed: row.try_get(3)?,
                ended: row.try_get(4)?,
                state: row.try_get(5)?,
            })
        })
        .collect()
}

/// Which of a build's neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// What it needs.
    Inputs,
    /// What needs it.
    Dependents,
}

/// How many neighbours are looked at: a compiler has a hundred thousand.
pub const NEIGHBOURS: i64 = 1000;

/// A build's neighbours, those first that are not done, up to `limit`; and how many there are, up to [`NEIGHBOURS`].
pub async fn neighbours(db: &Db, build: i64, side: Side, limit: i64) -> Result<(Vec<Vertex>, i64)> {
    let near = match side {
        Side::Inputs => "SELECT input AS id FROM ci.job_input WHERE referrer = $1",
        Side::Dependents => "SELECT referrer AS id FROM ci.job_input WHERE input = $1",
    };
    let text = format!(
        "SELECT j.id, j.drv_path, j.depth, {STATE}, count(*) OVER () FROM ({near} LIMIT {NEIGHBOURS}) i JOIN ci.job j ON j.id = i.id
         LEFT JOIN ci.running r ON r.job_id = j.id ORDER BY j.state IN ('succeeded', 'cached'), r.job_id IS NULL, j.id LIMIT $2"
    );
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(build).bind(limit)).await?;
    let all = rows.first().map_or(Ok(0), |row| row.try_get(4))?;
    Ok((rows.iter().map(vertex).collect::<Result<_>>()?, all))
}

/// An evaluation that wants a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// Its number.
    pub evaluation: i64,
    /// Whose it is.
    pub project: String,
    /// Its branch.
    pub branch: Option<String>,
    /// What it calls the build, if the build has a name there.
    pub attribute: Option<String>,
}

/// The latest evaluations that want a build.
pub async fn wants(db: &Db, build: i64, limit: i64) -> Result<Vec<Want>> {
    let query = sqlx::query(
        "SELECT e.id, p.name, e.branch, (SELECT a.attr FROM ci.evaluation_attr a WHERE a.job_id = $1 AND a.evaluation_id = e.id ORDER BY a.attr LIMIT 1)
         FROM (SELECT evaluation_id FROM ci.want WHERE job_id = $1 ORDER BY evaluation_id DESC LIMIT $2) w
         JOIN ci.evaluation e ON e.id = w.evaluation_id JOIN ci.project p ON p.id = e.project_id ORDER BY e.id DESC",
    );
    let rows = db.rows(query.bind(build).bind(limit)).await?;
    rows.iter()
        .map(|row| {
            Ok(Want {
                evaluation: row.try_get(0)?,
                project: row.try_get(1)?,
                branch: row.try_get(2)?,
                attribute: row.try_get(3)?,
            })
        })
        .collect()
}

/// A build on a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Busy {
    /// The node.
    pub node: i32,
    /// The build.
    pub id: i64,
    /// Its derivation.
    pub drv_path: String,
    /// building, uploading or publishing.
    pub phase: String,
    /// For how long.
    pub time: Duration,
}

/// What the nodes do, 2,000 builds at most, the longest first.
pub async fn busy(db: &Db) -> Result<Vec<Busy>> {
    let query = sqlx::query(
        "SELECT r.node_id, r.job_id, j.drv_path, CASE r.phase WHEN 'accepted' THEN 'publishing' ELSE r.phase::text END,
           extract(epoch FROM ci.clock() - r.claimed_at)::float8
         FROM ci.running r JOIN ci.job j ON j.id = r.job_id ORDER BY r.claimed_at, r.job_id LIMIT 2000",
    );
    let rows = db.rows(query).await?;
    rows.iter()
        .map(|row| {
            Ok(Busy {
                node: row.try_get(0)?,
                id: row.try_get(1)?,
                drv_path: row.try_get(2)?,
                phase: row.try_get(3)?,
                time: Duration::try_from_secs_f64(row.try_get(4)?).unwrap_or_default(),
            })
        })
        .collect()
}

/// A pool, as people see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// What it builds for.
    pub systems: Vec<String>,
    /// What it offers; the mandatory ones last.
    pub features: Vec<String>,
    /// It cannot have more nodes.
    pub at_maximum: bool,
    /// What keeps nodes from running that it should have.
    pub note: Option<String>,
}

/// All of them, by name.
pub async fn pools(db: &Db) -> Result<Vec<Pool>> {
    let query = sqlx::query(
        "SELECT name, systems, features || mandatory_features, at_maximum, note FROM ci.pool WHERE deleted_at IS NULL ORDER BY name",
    );
    let rows = db.rows(query).await?;
    rows.iter()
        .map(|row| {
            Ok(Pool {
                name: row.try_get(0)?,
                systems: row.try_get(1)?,
                features: row.try_get(2)?,
                at_maximum: row.try_get(3)?,
                note: row.try_get(4)?,
            })
        })
        .collect()
}

/// A second build of a path that made something else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Its number.
    pub id: i64,
    /// Which path.
    pub path: String,
    /// The hash that counts, in hexadecimal,
    pub canonical: String,
    /// and the other one.
    pub seen: String,
    /// By which build,
    pub build: i64,
    /// in which attempt,
    pub attempt: i64,
    /// where,
    pub node: Option<String>,
    /// and when.
    pub found_at: String,
}

/// Findings, the newest first, older than `before`.
pub async fn findings(db: &Db, before: Option<i64>, limit: i64) -> Result<Vec<Finding>> {
    let query = sqlx::query(
        "SELECT f.id, f.path, encode(f.canonical_hash, 'hex'), encode(f.seen_hash, 'hex'), f.job_id, f.attempt, n.name, ci.moment(f.found_at)
         FROM ci.finding f LEFT JOIN ci.node n ON n.id = f.node_id WHERE $1::bigint IS NULL OR f.id < $1 ORDER BY f.id DESC LIMIT $2",
    );
    let rows = db.rows(query.bind(before).bind(limit)).await?;
    rows.iter()
        .map(|row| {
            Ok(Finding {
                id: row.try_get(0)?,
                path: row.try_get(1)?,
                canonical: row.try_get(2)?,
                seen: row.try_get(3)?,
                build: row.try_get(4)?,
                attempt: row.try_get(5)?,
                node: row.try_get(6)?,
                found_at: row.try_get(7)?,
            })
        })
        .collect()
}

/// The branches of a project by their latest evaluation, up to 50. An index holds them together: each costs one look.
pub async fn branches(db: &Db, project: &str) -> Result<Vec<(Option<String>, i64)>> {
    let query = sqlx::query(
        "WITH RECURSIVE p AS (SELECT id FROM ci.project WHERE name = $1),
         b (branch, n) AS ((SELECT min(e.branch), 1 FROM ci.evaluation e, p WHERE e.project_id = p.id) UNION ALL
           SELECT (SELECT min(e.branch) FROM ci.evaluation e, p WHERE e.project_id = p.id AND e.branch > b.branch), b.n + 1 FROM b
           WHERE b.branch IS NOT NULL AND b.n < 500)
         SELECT b.branch, (SELECT max(e.id) FROM ci.evaluation e, p WHERE e.project_id = p.id AND e.branch = b.branch) AS latest FROM b WHERE b.branch IS NOT NULL
         UNION ALL SELECT NULL, x.id FROM (SELECT e.id FROM ci.evaluation e, p WHERE e.project_id = p.id AND e.branch IS NULL ORDER BY e.id DESC LIMIT 1) x
         ORDER BY latest DESC LIMIT 50",
    );
    let rows = db.rows(query.bind(project)).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// The latest evaluations of a project that are kept for good.
pub async fn pinned(db: &Db, project: &str, limit: i64) -> Result<Vec<i64>> {
    let query = sqlx::query(
        "SELECT e.id FROM ci.evaluation e JOIN ci.project p ON p.id = e.project_id WHERE p.name = $1 AND e.pinned ORDER BY e.id DESC LIMIT $2",
    );
    db.column(query.bind(project).bind(limit)).await
}

/// The latest evaluation of each project, those first that are newest.
pub async fn latest(db: &Db, limit: i64) -> Result<Vec<i64>> {
    let query = sqlx::query(
        "SELECT e.id FROM ci.project p CROSS JOIN LATERAL (SELECT e.id FROM ci.evaluation e WHERE e.project_id = p.id ORDER BY e.id DESC LIMIT 1) e
         WHERE p.deleted_at IS NULL ORDER BY e.id DESC LIMIT $1",
    );
    db.column(query.bind(limit)).await
}

/// What cookies are signed with.
pub async fn key(db: &Db) -> Result<String> {
    db.value(sqlx::query("SELECT ci.web_key()")).await
}

/// A token: its number, its name, and what it allows.
pub async fn token_of(db: &Db, secret: &str) -> Result<Option<(i32, String, Scope)>> {
    let rows = db.rows(sqlx::query("SELECT id, name, scope FROM ci.token_of($1)").bind(secret)).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some((row.try_get(0)?, row.try_get(1)?, row.try_get::<&str, _>(2)?.parse()?)))
}

/// What a token allows now. None: nothing.
pub async fn token_now(db: &Db, id: i32) -> Result<Option<Scope>> {
    let rows = db.rows(sqlx::query("SELECT scope FROM ci.token_now($1)").bind(id)).await?;
    rows.first().map(|row| row.try_get::<&str, _>(0)?.parse()).transpose()
}

/// Makes a way in that works once.
pub async fn invite(db: &Db, scope: Scope, within: Duration) -> Result<String> {
    let query = sqlx::query("SELECT ci.invite($1, make_interval(secs => $2))");
    db.value(query.bind(scope.as_str()).bind(within.as_secs_f64())).await
}

/// Takes it. None: it is none, somebody took it, or it is too late.
pub async fn accept_invitation(db: &Db, secret: &str) -> Result<Option<Scope>> {
    let rows = db.rows(sqlx::query("SELECT scope FROM ci.accept_invitation($1)").bind(secret)).await?;
    rows.first().map(|row| row.try_get::<&str, _>(0)?.parse()).transpose()
}
