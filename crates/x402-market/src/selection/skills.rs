//! Names of skills, as numbers.

use std::collections::BTreeMap;

/// Something evaluators are good or bad at, by its number: 0 to 63.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Skill(u8);

impl Skill {
    /// How many there can be.
    pub const LIMIT: usize = 64;

    /// The skill with this number, if it is below [`Skill::LIMIT`].
    pub const fn new(number: usize) -> Option<Self> {
        if number < Self::LIMIT { Some(Self(number as u8)) } else { None }
    }

    /// Its number.
    pub const fn number(self) -> usize {
        self.0 as usize
    }
}

/// A set of skills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SkillSet(u64);

impl SkillSet {
    /// Whether `skill` is in it.
    pub const fn contains(self, skill: Skill) -> bool {
        self.0 >> skill.0 & 1 == 1
    }

    /// Adds `skill`.
    pub const fn insert(&mut self, skill: Skill) {
        self.0 |= 1 << skill.0;
    }
}

impl FromIterator<Skill> for SkillSet {
    fn from_iter<I: IntoIterator<Item = Skill>>(skills: I) -> Self {
        let mut set = Self::default();
        skills.into_iter().for_each(|skill| set.insert(skill));
        set
    }
}

/// The skills that a student has work for, by name.
///
/// What cards claim beyond that is of no use to it, so that strangers cannot fill the table.
///
/// ```
/// use x402_market::selection::Skills;
///
/// let skills: Skills = ["arithmetic", "prose"].into_iter().collect();
/// let claimed = skills.set(["prose", "clairvoyance"]);
/// assert!(claimed.contains(skills.get("prose").unwrap()));
/// assert!(!claimed.contains(skills.get("arithmetic").unwrap()));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Skills(BTreeMap<String, Skill>);

impl Skills {
    /// Enters a skill, or finds it; `None` if there are [`Skill::LIMIT`] others.
    pub fn insert(&mut self, name: &str) -> Option<Skill> {
        if let Some(skill) = self.get(name) {
            return Some(skill);
        }
        let skill = Skill::new(self.0.len())?;
        self.0.insert(name.to_owned(), skill);
        Some(skill)
    }

    /// The skill of this name.
    pub fn get(&self, name: &str) -> Option<Skill> {
        self.0.get(name).copied()
    }

    /// How many are known.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those of the names that are known.
    pub fn set<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> SkillSet {
        names.into_iter().filter_map(|name| self.get(name)).collect()
    }
}

impl<'a> FromIterator<&'a str> for Skills {
    /// Names beyond the limit are left out.
    fn from_iter<I: IntoIterator<Item = &'a str>>(names: I) -> Self {
        let mut skills = Self::default();
        for name in names {
            skills.insert(name);
        }
        skills
    }
}
