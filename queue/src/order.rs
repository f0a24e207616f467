//! The line of ready builds, as the queue will take them if nothing else comes.

use std::cmp::Ordering;

use sqlx::Row;

use crate::{Db, Result};

/// A claim moves its project back by a minute per share until the build's own time is known.
const CHARGE: f64 = 60.0;

/// A build in line.
#[derive(Debug, Clone, PartialEq)]
pub struct Ready {
    /// Its number.
    pub id: i64,
    /// Its derivation.
    pub drv_path: String,
    /// For whom.
    pub project: String,
    /// For which evaluation, the oldest of the project that wants it.
    pub evaluation: i64,
    /// Asked for by a person, before all others.
    pub manual: bool,
    /// Builds in the longest chain that waits for it.
    pub height: i32,
    /// How long it has been ready, in seconds.
    pub waited: f64,
}

/// The queue in numbers, and its head.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// Builds that wait for others or for a retry,
    pub blocked: i64,
    /// that could be claimed,
    pub ready: i64,
    /// and that run.
    pub running: i64,
    /// The next ones, in order.
    pub next: Vec<Ready>,
}

/// The queue in numbers. What is many is counted up to 100,000.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Figures {
    /// Builds that could be claimed, by system,
    pub ready: Vec<(String, i64)>,
    /// that are being built,
    pub building: i64,
    /// that are on their way to the cache,
    pub uploading: i64,
    /// that are there and not signed yet,
    pub accepted: i64,
    /// and that wait for others or for a retry.
    pub blocked: i64,
    /// For how many seconds the first of the ready ones has waited.
    pub oldest: i64,
    /// What the resolver has not looked at yet.
    pub events: i64,
    /// Builders that live,
    pub nodes: i64,
    /// and what they may build at once.
    pub slots: i64,
}

/// Counts.
pub async fn figures(db: &Db) -> Result<Figures> {
    let ready = db
        .rows(sqlx::query(
            "SELECT c.system, count(*) FROM (SELECT class_id FROM ci.ready LIMIT 100000) r JOIN ci.class c ON c.id = r.class_id GROUP BY c.system",
        ))
        .await?;
    let row = db
        .row(sqlx::query(
            "SELECT (SELECT count(*) FROM (SELECT FROM ci.blocked LIMIT 100000) x) AS blocked,
               (SELECT count(*) FROM (SELECT FROM ci.event LIMIT 100000) x) AS events,
               count(*) FILTER (WHERE r.phase = 'building') AS building, count(*) FILTER (WHERE r.phase = 'uploading') AS uploading,
               count(*) FILTER (WHERE r.phase = 'accepted') AS accepted,
               (SELECT coalesce(extract(epoch FROM ci.clock() - min(x.since)), 0)::bigint FROM (SELECT since FROM ci.ready LIMIT 100000) x) AS oldest,
               (SELECT count(*) FROM ci.session WHERE ended_at IS NULL) AS nodes,
               (SELECT coalesce(sum(slots), 0)::bigint FROM ci.session WHERE ended_at IS NULL) AS slots
             FROM ci.running r",
        ))
        .await?;
    Ok(Figures {
        ready: ready.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect::<Result<_>>()?,
        building: row.try_get("building")?,
        uploading: row.try_get("uploading")?,
        accepted: row.try_get("accepted")?,
        blocked: row.try_get("blocked")?,
        oldest: row.try_get("oldest")?,
        events: row.try_get("events")?,
        nodes: row.try_get("nodes")?,
        slots: row.try_get("slots")?,
    })
}

#[derive(Debug, Clone)]
struct Project {
    /// Builder time per share that counts against it.
    rank: f64,
    weight: f64,
    /// In the order within the project.
    line: Vec<Ready>,
}

/// The next `limit` builds. What a node can run is not looked at: a builder takes the first ones that it can.
pub async fn look(db: &Db, limit: i64) -> Result<Line> {
    let counts = db
        .row(sqlx::query(
            "SELECT (SELECT count(*) FROM ci.blocked), (SELECT count(*) FROM ci.ready), (SELECT count(*) FROM ci.running)",
        ))
        .await?;
    Ok(Line {
        blocked: counts.try_get(0)?,
        ready: counts.try_get(1)?,
        running: counts.try_get(2)?,
        next: next(db, limit).await?,
    })
}

/// The head of the line alone.
pub async fn next(db: &Db, limit: i64) -> Result<Vec<Ready>> {
    let query = sqlx::query(
        "SELECT p.id, p.name, p.rank, p.weight, o.job_id, j.drv_path, o.evaluation_id, o.urgency < 0 AS manual, -o.shortness AS height,
           extract(epoch FROM ci.clock() - r.since)::float8 AS waited
         FROM (SELECT q.id, q.name, 1.0::float8 / q.shares AS weight,
                 coalesce((SELECT sum(l.used + l.inflight) FROM ci.lane l WHERE l.project_id = q.id), 0) / q.shares AS rank
               FROM ci.project q WHERE NOT q.paused AND q.deleted_at IS NULL) p
         CROSS JOIN LATERAL (SELECT * FROM ci.offer o WHERE o.project_id = p.id ORDER BY o.urgency, o.evaluation_id, o.shortness, o.job_id LIMIT $1) o
         JOIN ci.job j ON j.id = o.job_id JOIN ci.ready r ON r.job_id = o.job_id
         ORDER BY p.id, o.urgency, o.evaluation_id, o.shortness, o.job_id",
    );
    let mut projects: Vec<(i32, Project)> = Vec::new();
    for row in db.rows(query.bind(limit)).await? {
        let id: i32 = row.try_get("id")?;
        if projects.last().is_none_or(|(last, _)| *last != id) {
            let (rank, weight) = (row.try_get("rank")?, row.try_get("weight")?);
            projects.push((id, Project { rank, weight, line: Vec::new() }));
        }
        if let Some((_, project)) = projects.last_mut() {
            project.line.push(Ready {
                id: row.try_get("job_id")?,
                drv_path: row.try_get("drv_path")?,
                project: row.try_get("name")?,
                evaluation: row.try_get("evaluation_id")?,
                manual: row.try_get("manual")?,
                height: row.try_get("height")?,
                waited: row.try_get("waited")?,
            });
        }
    }
    let lines = projects.into_iter().map(|(_, project)| project).collect();
    Ok(merge(lines, usize::try_from(limit).unwrap_or(0)))
}

/// What people asked for first, then always the next of the project that has used the least per share. A build that several
/// projects want is in several lines and taken once.
fn merge(mut projects: Vec<Project>, limit: usize) -> Vec<Ready> {
    for project in &mut projects {
        project.line.reverse();
    }
    let mut order: Vec<Ready> = Vec::new();
    while order.len() < limit {
        let first = projects.iter_mut().filter(|project| !project.line.is_empty()).min_by(|a, b| {
            manual(b).cmp(&manual(a)).then(a.rank.partial_cmp(&b.rank).unwrap_or(Ordering::Equal))
        });
        let Some(project) = first else { break };
        let Some(next) = project.line.pop() else { break };
        if order.iter().all(|taken| taken.id != next.id) {
            project.rank += CHARGE * project.weight;
            order.push(next);
        }
    }
    order
}

fn manual(project: &Project) -> bool {
    project.line.last().is_some_and(|next| next.manual)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(id: i64, manual: bool) -> Ready {
        Ready {
            id,
            drv_path: String::new(),
            project: String::new(),
            evaluation: 1,
            manual,
            height: 0,
            waited: 0.0,
        }
    }

    fn project(rank: f64, shares: f64, ids: &[i64]) -> Project {
        Project { rank, weight: 1.0 / shares, line: ids.iter().map(|&id| ready(id, false)).collect() }
    }

    fn order(projects: Vec<Project>) -> Vec<i64> {
        merge(projects, 100).iter().map(|ready| ready.id).collect()
    }

    #[test]
    fn shares_decide_how_often_a_project_has_its_turn() {
        let projects = vec![project(0.0, 100.0, &[1, 2, 3]), project(0.0, 200.0, &[11, 12, 13, 14])];
        assert_eq!(order(projects), [1, 11, 12, 2, 13, 14, 3]);
    }

    #[test]
    fn who_has_used_less_comes_first() {
        assert_eq!(order(vec![project(5.0, 1.0, &[1]), project(1.0, 1.0, &[2])]), [2, 1]);
    }

    #[test]
    fn what_a_person_asked_for_goes_before_all() {
        let mut late = project(999.0, 1.0, &[]);
        late.line = vec![ready(7, true), ready(8, false)];
        assert_eq!(order(vec![project(0.0, 1.0, &[1]), late]), [7, 1, 8]);
    }

    #[test]
    fn a_build_that_two_want_is_taken_once() {
        assert_eq!(order(vec![project(0.0, 1.0, &[1, 2]), project(1.0, 1.0, &[1, 3])]), [1, 3, 2]);
    }
}
