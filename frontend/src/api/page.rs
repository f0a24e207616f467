//! Lists, page by page. Where a page begins is a key, not a count: what is added meanwhile moves nothing.

use harmonia_service::api::Page;
use harmonia_service::problem::Problem;

const USUAL: i64 = 50;
/// The most that one page holds.
pub const MOST: i64 = 200;

/// How many to show.
pub fn limit(asked: Option<i64>) -> Result<i64, Problem> {
    match asked.unwrap_or(USUAL) {
        limit @ 1..=MOST => Ok(limit),
        limit => Err(Problem::bad_request(format!("limit is {limit}: ask for 1 to {MOST}"))),
    }
}

/// The number behind which a page begins.
pub fn number(after: Option<&str>) -> Result<Option<i64>, Problem> {
    let Some(word) = after else { return Ok(None) };
    match word.parse() {
        Ok(number) if number > 0 => Ok(Some(number)),
        _ => Err(Problem::bad_request("after is not what `next` of an earlier page said")),
    }
}

/// A page of what was found, one more having been looked for than fit.
pub fn cut<A, B>(mut found: Vec<A>, limit: i64, key: fn(&A) -> String, show: fn(A) -> B) -> Page<B> {
    let room = usize::try_from(limit).unwrap_or(0);
    let more = found.len() > room;
    found.truncate(room);
    let next = if more { found.last().map(key) } else { None };
    Page { items: found.into_iter().map(show).collect(), next }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_neither_empty_nor_endless() {
        assert_eq!(limit(None).unwrap(), 50);
        assert_eq!(limit(Some(200)).unwrap(), 200);
        for asked in [0, -1, 201, i64::MAX] {
            assert!(limit(Some(asked)).is_err(), "{asked}");
        }
    }

    #[test]
    fn what_no_page_said_is_refused() {
        assert_eq!(number(None).unwrap(), None);
        assert_eq!(number(Some("7")).unwrap(), Some(7));
        for word in ["", "0", "-1", "x", "99999999999999999999"] {
            assert!(number(Some(word)).is_err(), "{word}");
        }
    }

    #[test]
    fn only_a_page_with_more_behind_it_says_where_that_begins() {
        let page = |found: &[i64]| cut(found.to_vec(), 2, i64::to_string, |item| item);
        assert_eq!((page(&[3, 2, 1]).items, page(&[3, 2, 1]).next.as_deref()), (vec![3, 2], Some("2")));
        assert_eq!(page(&[3, 2]).next, None);
        assert_eq!(page(&[]).next, None);
    }
}
