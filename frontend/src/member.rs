//! Who may start and stop builds: by their scope everywhere, and in a project whoever may push to its repository.

use harmonia_queue::Db;
use harmonia_queue::forges::{self, Place, Repository};
use harmonia_service::problem::Problem;
use harmonia_service::sentence::sentence;

use crate::forge::{ForgeError, Forges, Member};

/// What somebody wants to start or stop.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// An evaluation of one project.
    Evaluation(i64),
    /// A build is tried again, which is good for whoever wants it: one project of theirs is enough.
    Rebuild(i64),
    /// A build ends for all who want it: all of them must be theirs.
    Cancel(i64),
}

impl Target {
    /// Where the code is of every project that this is about; of one in no forge: none.
    pub async fn places(self, db: &Db) -> Result<Vec<Option<Place>>, Problem> {
        Ok(match self {
            Self::Evaluation(id) => forges::place_of_evaluation(db, id).await?,
            Self::Rebuild(id) | Self::Cancel(id) => forges::places_of_build(db, id).await?,
        })
    }

    /// Whether one project decides, by whether it is theirs.
    fn is_decided_by(self, theirs: bool) -> bool {
        theirs == matches!(self, Self::Rebuild(_))
    }

    /// By whether each project that it is about is theirs, or those up to the one that decides.
    fn is_allowed(self, theirs: &[bool]) -> bool {
        match self {
            Self::Rebuild(_) => theirs.contains(&true),
            Self::Evaluation(_) | Self::Cancel(_) => !theirs.is_empty() && !theirs.contains(&false),
        }
    }
}

/// Whether the forge of somebody lets them do it. `by_memory`: what it said a minute ago is good enough.
pub async fn is_allowed(
    forges: &Forges,
    member: &Member,
    target: Target,
    places: &[Option<Place>],
    by_memory: bool,
) -> Result<bool, Problem> {
    let mut theirs = Vec::with_capacity(places.len());
    for place in places {
        theirs.push(match place {
            Some(Place { instance, repository }) if *instance == member.instance => {
                forges.may_write(member, repository, by_memory).await.map_err(away)?
            }
            _ => false,
        });
        if theirs.last().is_some_and(|last| target.is_decided_by(*last)) {
            break;
        }
    }
    Ok(target.is_allowed(&theirs))
}

/// Whether somebody may push to one of these repositories of their forge.
pub async fn may_push_to_any(
    forges: &Forges,
    member: &Member,
    repositories: &[Repository],
) -> Result<bool, Problem> {
    forges.may_push_to_any(member, repositories).await.map_err(away)
}

fn away(error: ForgeError) -> Problem {
    let error = sentence(&error);
    tracing::warn!(error, "a forge could not be asked who may push");
    Problem::unavailable(format!("the forge could not be asked whether you may: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_stops_what_others_want() {
        for (theirs, rebuild, cancel) in [
            (&[][..], false, false),
            (&[true], true, true),
            (&[true, false], true, false),
            (&[false], false, false),
        ] {
            assert_eq!(Target::Rebuild(1).is_allowed(theirs), rebuild, "{theirs:?}");
            assert_eq!(Target::Cancel(1).is_allowed(theirs), cancel, "{theirs:?}");
            assert_eq!(Target::Evaluation(1).is_allowed(theirs), cancel, "{theirs:?}");
            for target in [Target::Rebuild(1), Target::Cancel(1)] {
                let asked = theirs
                    .iter()
                    .position(|one| target.is_decided_by(*one))
                    .map_or(theirs.len(), |at| at + 1);
                assert_eq!(target.is_allowed(&theirs[..asked]), target.is_allowed(theirs), "{theirs:?}");
            }
        }
    }
}
