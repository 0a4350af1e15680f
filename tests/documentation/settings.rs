//! The tables of settings, compared with the setters.

/// The heading of a table, and the file and the type whose setters it lists.
const TABLES: [(&str, &str); 3] = [
    ("Redlock::builder()", "src/lock/builder.rs"),
    ("RedlockLayer", "src/middleware/layer.rs"),
    ("IdempotencyLayer", "src/idempotency/layer.rs"),
];

/// Not settings: the end of the builder, and nodes for tests.
const NO_SETTINGS: [&str; 3] = ["build", "scripted", "simulated"];

/// The setters that the chapter lacks, and the names in it that are no setters.
pub(crate) fn differences(chapter: &str, read: &impl Fn(&str) -> String) -> Vec<String> {
    let mut found = Vec::new();
    for (heading, file) in TABLES {
        let listed = listed(chapter, heading);
        let setters = setters(&read(file));
        assert!(setters.len() > 5, "{file}: {setters:?}");
        let missing = setters.iter().filter(|name| !listed.contains(name));
        found.extend(missing.map(|name| format!("{heading} lacks `{name}`")));
        let unknown = listed.iter().filter(|name| !setters.contains(name));
        found.extend(unknown.map(|name| format!("{heading} lists `{name}`, which {file} lacks")));
    }
    found
}

/// The names in the first column of the table below a heading.
fn listed(chapter: &str, heading: &str) -> Vec<String> {
    let Some((_, section)) = chapter.split_once(&format!("# {heading}\n")) else {
        return Vec::new();
    };
    let section = section.split("\n# ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let columns = rows.filter_map(|row| row.split('|').nth(1));
    columns
        .flat_map(|column| column.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect()
}

/// The public methods that take `self` by value and something to set, also those that a macro writes.
fn setters(source: &str) -> Vec<String> {
    let source = source.split("\nmod tests").next().unwrap_or_default();
    let mut names = Vec::new();
    let functions = source.split("    pub fn ").skip(1);
    for function in functions {
        let signature: String = function
            .split('{')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        let name = function.split(['(', '<']).next().unwrap_or_default();
        let takes_self = ["(mutself,", "(self,"]
            .iter()
            .any(|part| signature.contains(part));
        if takes_self && !NO_SETTINGS.contains(&name) {
            names.push(name.to_owned());
        }
    }
    let by_macro = source.split("layer_setters! {").skip(1);
    let by_macro = by_macro.filter_map(|block| block.split("\n    }").next());
    for line in by_macro.flat_map(str::lines) {
        if let Some(name) = line.trim().strip_suffix(';')
            && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
        {
            names.push(name.to_owned());
        }
    }
    names
}

#[test]
fn planted_differences_are_found() {
    let chapter =
        "# Redlock::builder()\n\n| `a`, `gone` | x |\n\n# RedlockLayer\n\n# IdempotencyLayer\n";
    let names = ["a", "b", "c", "d", "e"];
    let methods =
        names.map(|name| format!("    pub fn {name}(mut self, x: u8) -> Self {{\n    }}\n"));
    let source = methods.concat() + "    layer_setters! {\n        /// Docs.\n        f;\n    }\n";
    let found = differences(chapter, &|_| source.clone());
    assert_eq!(
        found[..2],
        [
            "Redlock::builder() lacks `b`",
            "Redlock::builder() lacks `c`"
        ]
    );
    assert_eq!(found[4], "Redlock::builder() lacks `f`");
    assert_eq!(
        found[5],
        "Redlock::builder() lists `gone`, which src/lock/builder.rs lacks"
    );
    assert_eq!(found.len(), 18);
}
