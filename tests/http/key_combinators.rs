//! Keys of several parts, optional parts, conditions, and cookies as the `cookie` crate reads them.

use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::header::COOKIE;
use axum::http::request::Parts;
use tower_redlock::{KeyExtractor, LockKey, LockKeys, key};

#[test]
fn key_cookie_reads_random_headers_like_the_cookie_crate_or_refuses_them() {
    const PIECES: [&str; 22] = [
        "sid", "%73id", "=", "=", "=", ";", ";", " ", "\t", "\"", "%22", "%20", "%3B", "%3D", "%",
        "%5", "%00", "A", "B", ",", "+", "%C3%A9",
    ];
    let mut random = fastrand::Rng::with_seed(12);
    let mut read = 0;
    for _ in 0..200_000 {
        let pieces: String = (0..random.usize(1..9))
            .map(|_| random.choice(PIECES).unwrap())
            .collect();
        let text = if random.bool() {
            format!("sid={pieces}")
        } else {
            pieces
        };
        let Ok(value) = HeaderValue::from_str(&text) else {
            continue;
        };
        let mut request = Request::new(());
        request.headers_mut().insert(COOKIE, value);
        let ours = key::cookie("sid").extract(&request.into_parts().0);
        // As axum-extra's `CookieJar::from_headers` does.
        let mut jar = cookie::CookieJar::new();
        for cookie in text
            .split(';')
            .filter_map(|text| cookie::Cookie::parse_encoded(text.to_owned()).ok())
        {
            jar.add_original(cookie);
        }
        let Ok(ours) = ours else { continue };
        let theirs = jar
            .get("sid")
            .map(|cookie| cookie.value_trimmed().to_owned());
        let theirs = theirs.filter(|value| !value.is_empty());
        read += usize::from(theirs.is_some());
        assert_eq!(
            ours,
            theirs.map(|value| LockKey::from(value).into()),
            "{text:?}"
        );
    }
    assert!(read > 10_000, "{read}");
}

#[derive(Clone)]
struct UserId(&'static str);

fn keys_of(extractor: &impl KeyExtractor, user: Option<&'static str>) -> Option<LockKeys> {
    let mut request = Request::get("/?device=d").body(()).unwrap();
    if let Some(user) = user {
        request.extensions_mut().insert(UserId(user));
    }
    extractor.extract(&request.into_parts().0).unwrap()
}

#[test]
fn key_optional_extension_is_missing_in_every_combinator() {
    let user = || key::optional_extension::<UserId>(|user| user.0);
    let device = || key::query("device");
    let some = |key: LockKey| Some(LockKeys::from(key));
    for absent in [None, Some("")] {
        assert_eq!(keys_of(&("user", user()), absent), None);
        assert_eq!(keys_of(&key::each(device(), user()), absent), None);
        assert_eq!(keys_of(&user().or(device()), absent), some("d".into()));
        assert_eq!(
            keys_of(&user().when(|_| true).or(device()), absent),
            some("d".into())
        );
        assert_eq!(keys_of(&user().hashed().or(user()), absent), None);
        assert_eq!(
            keys_of(&("x", user().or(device())), absent),
            some(("x", "d").into())
        );
    }
    assert_eq!(
        keys_of(&("user", user()), Some("u")),
        some(("user", "u").into())
    );
}

#[test]
fn key_or_behind_a_conditional_literal_is_not_constant() {
    let staff = || "staff".when(|parts: &Parts| parts.uri.path() == "/staff");
    assert!(!staff().or(key::query("device")).describe().is_constant);
    assert!(!staff().or("customers").describe().is_constant);
    assert!("staff".or(key::query("device")).describe().is_constant);
}
